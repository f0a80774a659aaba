//! What TCP sees of the way to each origin: hardly ever why a client fails, but often why it waits.

use super::{Both, Finding, Weight};

/// Fewer segments than this sent again are an accident.
const RETRANSMITTED_MIN: u64 = 10;
/// Less than this, in percent, is usual between sites.
const RETRANSMITTED_PERCENT: u64 = 2;
/// Round trips are far from the peers' if they take so many times as long,
const RTT_FACTOR: u64 = 3;
/// and so much longer.
const RTT_MORE_US: u64 = 5000;

pub(super) fn paths(both: &Both<'_>, findings: &mut Vec<Finding>) {
    let known: Vec<_> = both.now.origins.iter().filter_map(|o| Some((o, o.path?))).collect();
    let mut notable = |evidence, setting: &str| {
        findings.push(Finding {
            layer: "path",
            weight: Weight::Notable,
            evidence,
            setting: Some(setting.to_owned()),
        });
    };
    for (origin, path) in &known {
        let before = both.before.origins.iter().find(|o| o.address == origin.address);
        let before = before.and_then(|o| o.path).unwrap_or_default();
        let rise = path.retransmitted.saturating_sub(before.retransmitted);
        if path.retransmitted >= RETRANSMITTED_MIN
            && path.retransmitted * 100 >= path.segments * RETRANSMITTED_PERCENT
        {
            notable(
                format!(
                    "{}: segments that had to be sent again: {rise} just now, {} of {} since the start",
                    origin.address, path.retransmitted, path.segments
                ),
                "outlier.enforcing_retransmission_percentage",
            );
        }
    }
    let mut timed: Vec<_> = known.into_iter().filter(|(_, p)| p.rtt_p50_us > 0).collect();
    timed.sort_by_key(|(_, path)| path.rtt_p50_us);
    // Of two, nobody can tell which is the odd one.
    let Some(middle) = timed.len().checked_sub(2).filter(|n| *n > 0).map(|n| n / 2) else { return };
    for (place, (origin, path)) in timed.iter().enumerate() {
        let peers_us = timed[middle + usize::from(middle >= place)].1.rtt_p50_us;
        if path.rtt_p50_us >= peers_us * RTT_FACTOR && path.rtt_p50_us - peers_us >= RTT_MORE_US {
            notable(
                format!(
                    "{}: a round trip takes {} us, to its peers {peers_us} us (medians)",
                    origin.address, path.rtt_p50_us
                ),
                "outlier.enforcing_rtt_latency",
            );
        }
    }
}

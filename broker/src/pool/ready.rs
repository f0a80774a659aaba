//! How many sockets are kept ready for an origin before anybody asks for them.
//!
//! As many as `prewarm` says, as long as they are of use. Where an origin closes connections that
//! nobody has used for a few seconds, dialling them again for ever would be the very churn that a
//! pool is there to end: with few requests for many origins it costs more handshakes than no pool.
//! So what has lain idle in vain until its end is not replaced, before somebody has had to wait; but
//! a pool never has fewer than `prewarm` sockets in all, so that the next exchange finds one.

use std::time::Duration;

/// What has been idle for so long when it ended was not needed. An origin that is restarted ends
/// sockets that were used just before; those are replaced.
pub const IN_VAIN_AFTER: Duration = Duration::from_secs(1);

/// The number of sockets that one pool keeps ready for one origin.
#[derive(Clone, Copy, Debug)]
pub struct Ready {
    most: usize,
    wanted: usize,
}

impl Ready {
    /// At first, `prewarm` of them.
    #[must_use]
    pub fn new(prewarm: usize) -> Self {
        Self { most: prewarm, wanted: prewarm }
    }

    /// How many there should be.
    #[must_use]
    pub fn wanted(self) -> usize {
        self.wanted
    }

    /// Somebody had to wait for a handshake.
    pub fn missed(&mut self) {
        self.wanted = self.most.min(self.wanted + 1);
    }

    /// A socket has ended that was idle for so long, and so many are left.
    pub fn ended_idle(&mut self, idle_for: Duration, left: usize) {
        if idle_for >= IN_VAIN_AFTER {
            self.wanted = self.wanted.min(left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_idle_in_vain_is_not_replaced_until_it_is_missed() {
        let mut ready = Ready::new(2);
        assert_eq!(ready.wanted(), 2);
        ready.ended_idle(Duration::from_millis(999), 0);
        assert_eq!(ready.wanted(), 2, "the origin was restarted");
        ready.ended_idle(IN_VAIN_AFTER, 5);
        assert_eq!(ready.wanted(), 2, "there are enough");
        ready.ended_idle(IN_VAIN_AFTER, 1);
        assert_eq!(ready.wanted(), 1);
        ready.ended_idle(IN_VAIN_AFTER, 0);
        assert_eq!(ready.wanted(), 0);
        (0..3).for_each(|_| ready.missed());
        assert_eq!(ready.wanted(), 2, "never more than configured");
    }
}

//! Whether a request is sent once more after an origin has failed it.

use super::attempt::Seen;
use crate::config::retries::{Condition, Retries};
use crate::session::refusal::Failure;

/// What decides of the request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    /// All of it is still in hand, and nothing ties it to the socket it was sent on.
    pub(super) held: bool,
    /// It may run twice (RFC 9110 section 9.2.2).
    pub(super) idempotent: bool,
    /// How often it may still be sent again at the cost of an attempt.
    pub(super) retries_left: usize,
}

impl Request {
    /// Whether it may be sent again at the cost of an attempt, even if an origin has run it.
    pub(super) fn may_run_elsewhere(self) -> bool {
        self.held && self.idempotent && self.retries_left > 0
    }
}

/// What decides of the attempt that has failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failed {
    pub(super) failure: Failure,
    /// What the origin may have seen of the request.
    pub(super) seen: Seen,
    /// Some of a response has come.
    pub(super) started: bool,
    /// The socket was kept open for a while.
    pub(super) reused: bool,
}

/// How a request may be sent once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Again {
    /// Not at all.
    Never,
    /// For nothing: that a socket that was kept open is dead is the pool's own fault. Leaving it costs the
    /// origin nothing, as it has seen nothing, and is no storm, as there is one dead socket less each time.
    /// Origins close their idle sockets together: counted attempts would be used up within milliseconds.
    Freely,
    /// At the cost of an attempt, and if not too many others just are.
    WithPermit,
}

/// Whether, and how, the request is sent once more.
pub(super) fn again(retries: &Retries, request: Request, failed: Failed) -> Again {
    let unseen = failed.seen == Seen::Nothing;
    let listed = unseen && retries.on.contains(Condition::Refused)
        || request.idempotent && retries.on.contains(Condition::ResetBeforeResponse);
    let mendable = matches!(failed.failure, Failure::OriginFailed | Failure::NoResponse);
    if !listed || !mendable || !request.held || failed.started || retries.attempts <= 1 {
        return Again::Never;
    }
    let crossed = failed.seen == Seen::Hardly && request.idempotent;
    if failed.reused && (unseen || crossed) {
        Again::Freely
    } else if request.retries_left > 0 {
        Again::WithPermit
    } else {
        Again::Never
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::retries::RetryLimit;

    const GET: Request = Request { held: true, idempotent: true, retries_left: 2 };
    const POST: Request = Request { idempotent: false, ..GET };
    const RESET: Failed =
        Failed { failure: Failure::OriginFailed, seen: Seen::Maybe, started: false, reused: true };
    const CROSSED: Failed = Failed { seen: Seen::Hardly, ..RESET };
    const UNSEEN: Failed = Failed { seen: Seen::Nothing, ..RESET };

    fn retries(on: &[Condition]) -> Retries {
        Retries { on: on.iter().copied().collect(), limit: RetryLimit::Fixed(3), attempts: 3 }
    }

    fn usual(request: Request, failed: Failed) -> Again {
        again(&retries(&[Condition::Refused, Condition::ResetBeforeResponse]), request, failed)
    }

    #[test]
    fn what_may_have_run_is_repeated_only_if_it_may_run_twice() {
        assert_eq!(usual(GET, RESET), Again::WithPermit);
        assert_eq!(usual(POST, RESET), Again::Never);
        assert_eq!(usual(POST, CROSSED), Again::Never);
        assert_eq!(usual(POST, UNSEEN), Again::Freely);
    }

    #[test]
    fn a_dead_socket_of_the_pool_costs_nothing_and_a_new_one_an_attempt() {
        let last = Request { retries_left: 0, ..GET };
        for failed in [CROSSED, UNSEEN] {
            assert_eq!(usual(last, failed), Again::Freely);
            let new = Failed { reused: false, ..failed };
            assert_eq!(usual(GET, new), Again::WithPermit);
            assert_eq!(usual(last, new), Again::Never);
        }
        assert_eq!(usual(last, RESET), Again::Never);
    }

    #[test]
    fn a_response_that_has_begun_or_stalled_is_never_repeated() {
        for seen in [Seen::Maybe, Seen::Hardly, Seen::Nothing] {
            let begun = Failed { seen, started: true, ..RESET };
            assert_eq!(usual(GET, begun), Again::Never);
            let stalled = Failed { seen, failure: Failure::OriginStalled, ..RESET };
            assert_eq!(usual(GET, stalled), Again::Never);
        }
        let junk = Failed { failure: Failure::NoResponse, ..RESET };
        assert_eq!(usual(GET, junk), Again::WithPermit);
    }

    #[test]
    fn a_request_that_is_not_in_hand_is_never_repeated() {
        for failed in [RESET, CROSSED, UNSEEN] {
            assert_eq!(usual(Request { held: false, ..GET }, failed), Again::Never);
        }
    }

    #[test]
    fn only_what_is_configured_leads_to_a_retry() {
        for failed in [RESET, CROSSED, UNSEEN] {
            assert_eq!(again(&retries(&[]), GET, failed), Again::Never);
            let once = Retries { attempts: 1, ..retries(&[Condition::ResetBeforeResponse]) };
            assert_eq!(again(&once, GET, failed), Again::Never);
        }
        let refused = retries(&[Condition::Refused]);
        assert_eq!(again(&refused, GET, RESET), Again::Never);
        assert_eq!(again(&refused, GET, CROSSED), Again::Never);
        assert_eq!(again(&refused, POST, UNSEEN), Again::Freely);
    }
}

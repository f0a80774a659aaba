//! What an http1 client is told when the broker itself cannot serve it.
//!
//! The only answers that do not come from an origin. Each names its reason in a header of its own,
//! so that nobody mistakes it for one of the origin's, and each ends the client's connection.

use crate::boundary::CloseReason;
use crate::pool::Refusal;

/// Why there is no response from an origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// No socket could be had.
    Refused(Refusal),
    /// The origin ended or reset the connection before its response began.
    OriginFailed,
    /// What the origin sent cannot be the beginning of a response.
    NoResponse,
    /// The origin did not begin its response within `origin_stall`.
    OriginStalled,
}

impl Failure {
    /// What becomes of the socket it happened on, a part of whose response may have come.
    pub(super) fn close_reason(self, started: bool) -> CloseReason {
        match self {
            Self::OriginStalled => CloseReason::Timeout,
            Self::NoResponse => CloseReason::Unsolicited,
            _ if started => CloseReason::Truncated,
            _ => CloseReason::OriginError,
        }
    }

    /// The complete response; to a HEAD request without its body.
    pub(super) fn response(self, head: bool) -> String {
        let (status, reason_header, text) = match self {
            Self::Refused(Refusal::QueueFull) => (
                "503 Service Unavailable",
                "x-broker-overloaded: max_pending\r\nRetry-After: 1",
                "too many exchanges are waiting for an origin socket",
            ),
            Self::Refused(Refusal::TooManyRequests) => (
                "503 Service Unavailable",
                "x-broker-overloaded: max_requests\r\nRetry-After: 1",
                "too many exchanges are under way",
            ),
            Self::Refused(Refusal::TooManyRetries) => (
                "503 Service Unavailable",
                "x-broker-overloaded: max_retries\r\nRetry-After: 1",
                "too many exchanges are being tried again",
            ),
            Self::Refused(Refusal::QueueTimeout) => (
                "503 Service Unavailable",
                "x-broker-overloaded: queue_timeout\r\nRetry-After: 1",
                "no origin socket became free in time",
            ),
            Self::Refused(Refusal::Unreachable) => (
                "503 Service Unavailable",
                "x-broker-unavailable: unreachable\r\nRetry-After: 1",
                "no origin accepts connections",
            ),
            Self::Refused(Refusal::NoOrigins) => (
                "503 Service Unavailable",
                "x-broker-unavailable: no_origins\r\nRetry-After: 1",
                "the service has no origins",
            ),
            Self::Refused(Refusal::Ejected) => (
                "503 Service Unavailable",
                "x-broker-unavailable: panic\r\nRetry-After: 1",
                "most origins have been ejected",
            ),
            Self::OriginFailed => (
                "502 Bad Gateway",
                "x-broker-unavailable: origin_failed",
                "the origin ended the connection without a response",
            ),
            Self::NoResponse => (
                "502 Bad Gateway",
                "x-broker-unavailable: no_response",
                "the origin sent something that is not a response",
            ),
            Self::OriginStalled => (
                "504 Gateway Timeout",
                "x-broker-unavailable: origin_stalled",
                "the origin did not respond in time",
            ),
        };
        let body = format!("broker: {text}\n");
        format!(
            "HTTP/1.1 {status}\r\n{reason_header}\r\nContent-Type: text/plain\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n{}",
            body.len(),
            if head { "" } else { &body },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_well_formed_and_name_their_reason() {
        let all = [
            (Failure::Refused(Refusal::QueueFull), "x-broker-overloaded: max_pending"),
            (Failure::Refused(Refusal::TooManyRequests), "x-broker-overloaded: max_requests"),
            (Failure::Refused(Refusal::TooManyRetries), "x-broker-overloaded: max_retries"),
            (Failure::Refused(Refusal::QueueTimeout), "x-broker-overloaded: queue_timeout"),
            (Failure::Refused(Refusal::Unreachable), "x-broker-unavailable: unreachable"),
            (Failure::Refused(Refusal::NoOrigins), "x-broker-unavailable: no_origins"),
            (Failure::OriginFailed, "x-broker-unavailable: origin_failed"),
            (Failure::NoResponse, "x-broker-unavailable: no_response"),
            (Failure::OriginStalled, "x-broker-unavailable: origin_stalled"),
        ];
        for (failure, header) in all {
            let response = failure.response(false);
            let (head, body) = response.split_once("\r\n\r\n").unwrap();
            assert!(head.contains(&format!("\r\n{header}")), "{head}");
            assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
            assert!(failure.response(true).ends_with("\r\n\r\n"));
        }
    }
}

//! Opaque bytes: nothing in them marks an end, so only what happens around them can.
//!
//! `reuse = "quiet"` is the operator's promise that the protocol is a simple request and response
//! without state on the connection. Even then a socket may serve another client only if everything
//! looks as it would after such an exchange. [`Quiet`] keeps the part of this that depends on the
//! order of events; that both queues are empty and that the origin stays silent for the settle time
//! is for the session to see.

/// Whether a connection looks like a finished exchange of a request/response protocol.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quiet {
    client_sent: bool,
    origin_spoke_last: bool,
    client: Client,
    origin_closed: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Client {
    #[default]
    Open,
    ClosedCleanly,
    Broken,
}

impl Quiet {
    /// Bytes came from the client.
    pub fn client_bytes(&mut self, n: usize) {
        if n > 0 {
            self.client_sent = true;
            self.origin_spoke_last = false;
        }
    }

    /// Bytes came from the origin. They count only once the client has asked something: a greeting
    /// is not an answer.
    pub fn origin_bytes(&mut self, n: usize) {
        if n > 0 {
            self.origin_spoke_last = self.client_sent;
        }
    }

    /// The client ended its connection: cleanly with a FIN, or not (a reset, an error, a time
    /// limit). Once broken it stays so.
    pub fn client_closed(&mut self, clean: bool) {
        if !clean {
            self.client = Client::Broken;
        } else if self.client == Client::Open {
            self.client = Client::ClosedCleanly;
        }
    }

    /// The origin closed or reset the connection.
    pub fn origin_closed(&mut self) {
        self.origin_closed = true;
    }

    /// Whether the conditions for reuse hold at this moment: both sides have spoken, the origin
    /// last, the client closed cleanly and the origin is open.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.origin_spoke_last && self.client == Client::ClosedCleanly && !self.origin_closed
    }
}

#[cfg(test)]
mod tests {
    use super::Quiet;

    /// `c`/`o`: bytes of client and origin; `0`/`9`: empty reads of them; `F`: the client's FIN;
    /// `R`: its reset; `E`: the origin's end.
    fn holds(events: &str) -> bool {
        let mut quiet = Quiet::default();
        for event in events.chars() {
            match event {
                'c' => quiet.client_bytes(3),
                'o' => quiet.origin_bytes(5),
                '0' => quiet.client_bytes(0),
                '9' => quiet.origin_bytes(0),
                'F' => quiet.client_closed(true),
                'R' => quiet.client_closed(false),
                'E' => quiet.origin_closed(),
                other => panic!("no such event: {other}"),
            }
        }
        quiet.holds()
    }

    #[test]
    fn conditions() {
        for (events, expected) in [
            ("coF", true),
            ("cocoF", true),
            // The client half-closes after its request; the answer still comes.
            ("cFo", true),
            // A greeting, then a proper exchange.
            ("ocoF", true),
            ("co0F9", true),
            // Still open, or nothing happened.
            ("", false),
            ("co", false),
            ("F", false),
            // Only one side has spoken.
            ("cF", false),
            ("oF", false),
            ("c9F", false),
            // A greeting after the request is no matter, before it it is no answer.
            ("ocF", false),
            // The last word was the client's: its answer may still be under way.
            ("cocF", false),
            // The client did not end cleanly, before or after its FIN.
            ("coR", false),
            ("coFR", false),
            ("coRF", false),
            // The origin is gone.
            ("coEF", false),
            ("coFE", false),
        ] {
            assert_eq!(holds(events), expected, "events {events:?}");
        }
    }
}

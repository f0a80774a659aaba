//! What clients do.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// A way to use connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// A request on a connection of its own, which the client closes.
    OneShot,
    /// The same with `Connection: close`: the broker closes.
    Close,
    /// HTTP/1.0, with and without keep-alive.
    Http10,
    /// Many requests, one after the other.
    KeepAlive,
    /// Many requests, all of which the kernel could carry: short, and with a length.
    Plain,
    /// Several requests in one write.
    Pipeline,
    /// Several requests, each in a write of its own, without waiting.
    PipelineWrites,
    /// Leaves with a part of the request unsent, or before the response; by FIN.
    Abandon,
    /// Leaves in the middle of the response.
    AbandonMid,
    /// As `abandon`, by RST.
    Reset,
    /// As `abandon-mid`, by RST.
    ResetMid,
    /// Ends its side right after the request and reads to the end.
    HalfClose,
    /// Reads a little at a time, with pauses.
    SlowReader,
    /// Sends a little at a time, with pauses.
    Dribble,
    /// A small body in the same write as the head.
    Post,
    /// A small body in a write of its own.
    PostSecondWrite,
    /// A body of up to half a megabyte.
    PostLarge,
    /// A chunked request body.
    PostChunked,
    /// Waits for a 100 before the body.
    PostExpect,
    /// The final response comes while the body is still on its way.
    PostEarly,
    /// HEAD requests.
    Head,
    /// Responses that have no body: 204 and 304.
    Bodiless,
    /// Responses of up to 4 MB.
    Large,
}

impl Mode {
    /// All of them, with how many of a thousand connections use them.
    pub(super) const WEIGHTS: [(Self, u64); 23] = [
        (Self::OneShot, 190),
        (Self::Close, 140),
        (Self::Http10, 60),
        (Self::KeepAlive, 55),
        (Self::Plain, 15),
        (Self::Pipeline, 50),
        (Self::PipelineWrites, 50),
        (Self::Abandon, 30),
        (Self::AbandonMid, 25),
        (Self::Reset, 30),
        (Self::ResetMid, 25),
        (Self::HalfClose, 50),
        (Self::SlowReader, 10),
        (Self::Dribble, 15),
        (Self::Post, 70),
        (Self::PostSecondWrite, 45),
        (Self::PostLarge, 8),
        (Self::PostChunked, 32),
        (Self::PostExpect, 20),
        (Self::PostEarly, 20),
        (Self::Head, 30),
        (Self::Bodiless, 28),
        (Self::Large, 2),
    ];

    /// Whether some of its requests have a body.
    #[must_use]
    pub fn uploads(self) -> bool {
        match self {
            Self::OneShot
            | Self::Close
            | Self::Http10
            | Self::Plain
            | Self::AbandonMid
            | Self::ResetMid
            | Self::SlowReader
            | Self::Head
            | Self::Bodiless
            | Self::Large => false,
            Self::KeepAlive
            | Self::Pipeline
            | Self::PipelineWrites
            | Self::Abandon
            | Self::Reset
            | Self::HalfClose
            | Self::Dribble
            | Self::Post
            | Self::PostSecondWrite
            | Self::PostLarge
            | Self::PostChunked
            | Self::PostExpect
            | Self::PostEarly => true,
        }
    }

    /// Its name on the command line and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::OneShot => "one-shot",
            Self::Close => "close",
            Self::Http10 => "http10",
            Self::KeepAlive => "keep-alive",
            Self::Plain => "plain",
            Self::Pipeline => "pipeline",
            Self::PipelineWrites => "pipeline-writes",
            Self::Abandon => "abandon",
            Self::AbandonMid => "abandon-mid",
            Self::Reset => "reset",
            Self::ResetMid => "reset-mid",
            Self::HalfClose => "half-close",
            Self::SlowReader => "slow-reader",
            Self::Dribble => "dribble",
            Self::Post => "post",
            Self::PostSecondWrite => "post-second-write",
            Self::PostLarge => "post-large",
            Self::PostChunked => "post-chunked",
            Self::PostExpect => "post-expect",
            Self::PostEarly => "post-early",
            Self::Head => "head",
            Self::Bodiless => "bodiless",
            Self::Large => "large",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_command_line() {
        for (mode, _) in Mode::WEIGHTS {
            assert_eq!(<Mode as ValueEnum>::from_str(mode.name(), false), Ok(mode));
        }
        assert_eq!(Mode::WEIGHTS.len(), Mode::value_variants().len());
    }
}

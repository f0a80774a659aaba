//! What is measured: how connections are used, how large responses are, how many clients.

use std::iter;

use harness::load;
use harness::origin::nginx;
use serde::Serialize;

/// One combination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Cell {
    pub(super) mode: Mode,
    pub(super) size: Size,
    pub(super) clients: usize,
}

/// How clients use connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Mode {
    /// A new connection for each request, `Connection: close`.
    OneShot,
    /// A new connection for each request, which the client closes without announcing it.
    Brief,
    /// One connection for each client.
    KeepAlive,
}

/// How large responses are: an index into [`nginx::FILES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Size {
    #[serde(rename = "128")]
    Small,
    #[serde(rename = "64k")]
    Medium,
    #[serde(rename = "1m")]
    Large,
}

impl Cell {
    pub(super) fn all(quick: bool) -> impl Iterator<Item = Self> {
        let clients: &[usize] = if quick { &[32] } else { &[1, 32, 256] };
        [Mode::OneShot, Mode::Brief, Mode::KeepAlive].into_iter().flat_map(move |mode| {
            // Brief connections matter where the kernel could serve them whole.
            let sizes: &[Size] = match mode {
                Mode::Brief => &[Size::Small],
                Mode::OneShot | Mode::KeepAlive => &[Size::Small, Size::Medium, Size::Large],
            };
            sizes.iter().flat_map(move |&size| {
                iter::repeat((mode, size)).zip(clients).map(|((mode, size), &clients)| Self {
                    mode,
                    size,
                    clients,
                })
            })
        })
    }

    /// For people and for `--only`.
    pub(super) fn name(self) -> String {
        format!("{}/{}/{}", self.mode.name(), self.size.name(), self.clients)
    }
}

impl Mode {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::OneShot => "one-shot",
            Self::Brief => "brief",
            Self::KeepAlive => "keep-alive",
        }
    }
}

impl From<Mode> for load::Mode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::OneShot => Self::OneShot,
            Mode::Brief => Self::OneShotClientCloses,
            Mode::KeepAlive => Self::KeepAlive,
        }
    }
}

impl Size {
    pub(super) fn name(self) -> &'static str {
        &self.path()[1..]
    }

    pub(super) fn path(self) -> &'static str {
        nginx::FILES[self as usize].0
    }

    pub(super) fn bytes(self) -> u64 {
        nginx::FILES[self as usize].1
    }
}

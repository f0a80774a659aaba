//! What the kernel complains of meanwhile.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;

use anyhow::{Context as _, Result};

/// How the lines begin, or what they hold, that no correct kernel writes.
const COMPLAINTS: [&str; 10] = [
    "WARNING:",
    "BUG:",
    "Oops",
    "KASAN",
    "UBSAN",
    "general protection fault",
    "refcount_t:",
    "rcu: INFO",
    "kernel panic",
    "blocked for more than",
];

/// The kernel's log from now on.
pub(super) struct KernelLog(File);

impl KernelLog {
    pub(super) fn open() -> Result<Self> {
        let mut file = OpenOptions::new()
            .read(true)
            .custom_flags(nix::libc::O_NONBLOCK)
            .open("/dev/kmsg")
            .context("/dev/kmsg")?;
        file.seek(SeekFrom::End(0)).context("/dev/kmsg")?;
        Ok(Self(file))
    }

    /// The complaints since.
    pub(super) fn complaints(&mut self) -> Result<Complaints> {
        let mut complaints = Complaints::default();
        // One read is one record.
        let mut record = [0; 8192];
        loop {
            match self.0.read(&mut record) {
                Ok(0) => return Ok(complaints),
                Ok(n) => {
                    let text = String::from_utf8_lossy(&record[..n]).into_owned();
                    let line = text.split_once(';').map_or(&*text, |(_, rest)| rest);
                    let line = line.lines().next().unwrap_or("");
                    complaints.read(line);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(complaints),
                // Older records were overwritten; the next read goes on with what is left.
                Err(e) if e.kind() == ErrorKind::BrokenPipe => {}
                Err(e) => return Err(e).context("/dev/kmsg"),
            }
        }
    }
}

/// What the kernel has complained of.
#[derive(Debug, Default)]
pub(super) struct Complaints {
    /// The lines.
    pub(super) unknown: Vec<String>,
    /// Those of a fault of its own that any user of sockmaps meets. Its thread that hands redirected bytes
    /// over (`sk_psock_backlog`, net/core/skmsg.c) charges a socket for them (`sk_forward_alloc`) without
    /// the socket's lock, and TCP changes the same number under that: one of two changes may be lost.
    /// When the socket is freed, the number is not 0. It says so once, until the next boot.
    pub(super) known: Vec<String>,
}

impl Complaints {
    fn read(&mut self, line: &str) {
        if is_complaint(line) {
            self.unknown.push(line.to_owned());
        } else if line.contains("Workqueue: events sk_psock_destroy") {
            // Of the last one.
            let known = self.unknown.pop_if(|last| last.contains(" inet_sock_destruct+"));
            self.known.extend(known);
        }
    }
}

fn is_complaint(line: &str) -> bool {
    COMPLAINTS.iter().any(|complaint| line.contains(complaint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_are_told_from_talk() {
        assert!(is_complaint("WARNING: CPU: 1 PID: 77 at net/core/skmsg.c:438 sk_msg_recvmsg"));
        assert!(is_complaint("BUG: kernel NULL pointer dereference, address: 0000000000000008"));
        assert!(!is_complaint("TCP: request_sock_TCP: Possible SYN flooding on port 80."));
    }

    #[test]
    fn a_fault_of_the_kernels_own_is_told_from_others() {
        let destruct =
            "WARNING: CPU: 1 PID: 9 at net/ipv4/af_inet.c:157 inet_sock_destruct+0x174/0x1a0";
        let other = "WARNING: CPU: 1 PID: 9 at net/core/stream.c:207 sk_stream_kill_queues+0x1/0x2";
        for (lines, expected) in [
            ([destruct, "CPU: 1 UID: 0", "Workqueue: events sk_psock_destroy"], (0, 1)),
            ([other, "CPU: 1 UID: 0", "Workqueue: events sk_psock_destroy"], (1, 0)),
            ([destruct, "CPU: 1 UID: 0", "Workqueue: events other_work"], (1, 0)),
            ([destruct, other, "Workqueue: events sk_psock_destroy"], (2, 0)),
        ] {
            let mut complaints = Complaints::default();
            for line in lines {
                complaints.read(line);
            }
            assert_eq!((complaints.unknown.len(), complaints.known.len()), expected, "{lines:?}");
        }
    }
}

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
    pub(super) fn warnings(&mut self) -> Result<Vec<String>> {
        let mut warnings = Vec::new();
        // One read is one record.
        let mut record = [0; 8192];
        loop {
            match self.0.read(&mut record) {
                Ok(0) => return Ok(warnings),
                Ok(n) => {
                    let text = String::from_utf8_lossy(&record[..n]).into_owned();
                    let line = text.split_once(';').map_or(&*text, |(_, rest)| rest);
                    let line = line.lines().next().unwrap_or("");
                    if is_complaint(line) {
                        warnings.push(line.to_owned());
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(warnings),
                // Older records were overwritten; the next read goes on with what is left.
                Err(e) if e.kind() == ErrorKind::BrokenPipe => {}
                Err(e) => return Err(e).context("/dev/kmsg"),
            }
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
}

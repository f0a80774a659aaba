//! The log's way out: a bounded queue, and one thread that writes.
//!
//! Nobody waits for whoever reads the log, or does not: while a pipe is full, workers serve and signals
//! are heard. Lines that find the queue full are counted and dropped, and the log says so when it is
//! read again.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::Duration;

use crate::clock;

/// How many lines may wait for the thread that writes them.
const QUEUE_MAX: usize = 4096;

/// How long the end of the process may wait for whoever reads the last lines.
const FLUSH_MAX: Duration = Duration::from_secs(1);

/// The way in. Every write to it is a line of its own.
#[derive(Clone, Debug)]
pub struct Log {
    queue: SyncSender<Message>,
    lost: Arc<AtomicU64>,
}

#[derive(Debug)]
enum Message {
    Line(Vec<u8>),
    /// To be answered when all before it is written.
    Flush(SyncSender<()>),
}

impl Log {
    /// Starts the thread that writes.
    pub fn to(out: impl Write + Send + 'static) -> io::Result<Self> {
        let (queue, messages) = sync_channel(QUEUE_MAX);
        let lost = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&lost);
        thread::Builder::new()
            .name("log".into())
            .spawn(move || forward(&messages, out, &counted))?;
        Ok(Self { queue, lost })
    }

    /// Says something as it is, behind all that was logged.
    pub fn say(&self, text: &str) {
        self.send(format!("{text}\n").into_bytes());
    }

    /// Waits until everything is written, but not for ever.
    pub fn flush(&self) {
        let start = clock::now();
        let left = || FLUSH_MAX.saturating_sub(clock::now() - start);
        let (done, flushed) = sync_channel(1);
        let mut message = Message::Flush(done);
        while let Err(TrySendError::Full(again)) = self.queue.try_send(message) {
            if left().is_zero() {
                return;
            }
            message = again;
            thread::sleep(Duration::from_millis(5));
        }
        // An error means that it takes too long.
        flushed.recv_timeout(left()).ok();
    }

    fn send(&self, line: Vec<u8>) {
        if self.queue.try_send(Message::Line(line)).is_err() {
            self.lost.fetch_add(1, Relaxed);
        }
    }
}

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.send(line.to_vec());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes until nobody logs any more.
fn forward(messages: &Receiver<Message>, mut out: impl Write, lost: &AtomicU64) {
    let mut told = 0;
    for message in messages {
        match message {
            // Nobody could be told of an error.
            Message::Line(line) => {
                out.write_all(&line).ok();
            }
            Message::Flush(done) => {
                out.flush().ok();
                done.send(()).ok();
            }
        }
        let now = lost.load(Relaxed);
        if now != told {
            told = now;
            tracing::warn!(lines = now, "nobody has read the log in time: so many lines are lost");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// Takes a line for each word that it is given, and keeps them.
    struct Reader {
        words: Receiver<()>,
        lines: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for Reader {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            self.words.recv().ok();
            self.lines.lock().unwrap().extend(line);
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn log() -> (Log, Sender<()>, Arc<Mutex<Vec<u8>>>) {
        let (word, words) = channel();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let log = Log::to(Reader { words, lines: Arc::clone(&lines) }).unwrap();
        (log, word, lines)
    }

    #[test]
    fn who_logs_waits_for_nobody_and_what_is_lost_is_counted() {
        let (log, word, lines) = log();
        let all = QUEUE_MAX + 100;
        for i in 0..all {
            log.say(&i.to_string());
        }
        let lost = usize::try_from(log.lost.load(Relaxed)).unwrap();
        // The thread may have one line more than the queue.
        assert!((99..=100).contains(&lost), "{lost}");
        let start = clock::now();
        log.flush();
        // It comes back although nothing is written.
        assert!(clock::now() - start >= FLUSH_MAX);

        drop(word);
        log.flush();
        let written = String::from_utf8(lines.lock().unwrap().clone()).unwrap();
        let expected = (0..all - lost).map(|i| i.to_string());
        assert!(written.lines().eq(expected), "not in order");
    }

    #[test]
    fn last_words_are_written() {
        let (log, word, lines) = log();
        drop(word);
        log.say("that is all");
        log.flush();
        assert_eq!(*lines.lock().unwrap(), b"that is all\n");
    }
}

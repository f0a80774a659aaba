//! An origin that answers as it is told.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// What a request is answered with.
#[derive(Clone)]
pub(in crate::health) enum Answer {
    /// These bytes; the connection stays.
    Send(Vec<u8>),
    /// These bytes, and the end of the connection.
    End(Vec<u8>),
    /// These bytes, and then this one again and again, after a pause each time.
    Drip(&'static [u8], u8, Duration),
}

impl Answer {
    pub(in crate::health) fn ok() -> Self {
        Self::Send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok".to_vec())
    }
}

pub(in crate::health) struct Server {
    pub(in crate::health) address: SocketAddr,
    shared: Arc<Shared>,
    /// Ends with the server.
    _task: JoinSet<()>,
}

struct Shared {
    /// To the first request of a connection, and to the following ones.
    answers: Mutex<[Answer; 2]>,
    accepted: AtomicUsize,
    requests: Mutex<Vec<String>>,
}

impl Server {
    pub(in crate::health) async fn start(answer: Answer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared {
            answers: Mutex::new([answer.clone(), answer]),
            accepted: AtomicUsize::new(0),
            requests: Mutex::default(),
        });
        let mut task = JoinSet::new();
        let server = Arc::clone(&shared);
        task.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                server.accepted.fetch_add(1, Relaxed);
                connections.spawn(Arc::clone(&server).serve(stream));
            }
        });
        Self { address, shared, _task: task }
    }

    /// Answers so from now on.
    pub(in crate::health) fn answers(&self, answer: Answer) {
        self.answers_first_and_then(answer.clone(), answer);
    }

    /// Answers so the first request of each connection, and the ones after that.
    pub(in crate::health) fn answers_first_and_then(&self, first: Answer, then: Answer) {
        *self.shared.answers.lock().expect("answers") = [first, then];
    }

    pub(in crate::health) fn accepted(&self) -> usize {
        self.shared.accepted.load(Relaxed)
    }

    /// The heads of all requests so far.
    pub(in crate::health) fn requests(&self) -> Vec<String> {
        self.shared.requests.lock().expect("requests").clone()
    }
}

impl Shared {
    async fn serve(self: Arc<Self>, mut stream: TcpStream) {
        for request in 0.. {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                match stream.read_u8().await {
                    Ok(byte) => head.push(byte),
                    Err(_) => return,
                }
            }
            let head = String::from_utf8(head).expect("text");
            self.requests.lock().expect("requests").push(head);
            let answer = self.answers.lock().expect("answers")[request.min(1)].clone();
            // A client that has left is no concern of the server's.
            match answer {
                Answer::Send(bytes) => stream.write_all(&bytes).await.unwrap_or_default(),
                Answer::End(bytes) => return stream.write_all(&bytes).await.unwrap_or_default(),
                Answer::Drip(start, byte, pause) => {
                    stream.write_all(start).await.unwrap_or_default();
                    while stream.write_u8(byte).await.is_ok() {
                        match pause {
                            Duration::ZERO => tokio::task::yield_now().await,
                            pause => tokio::time::sleep(pause).await,
                        }
                    }
                    return;
                }
            }
        }
    }
}

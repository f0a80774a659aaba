//! How the connections of steered clients end: what the kernel delivers comes through another queue
//! than the end of the connection, and must all come before it, however late anybody runs.

use std::time::Duration;

use harness::origin::nginx;
use harness::{Daemon, Lab, Launch, Process, eventually};

use crate::support::{SOON, addresses};

/// Each client asks for one to three responses on a connection and reads on until it ends: in blocking
/// calls, or when epoll says so, level- or edge-triggered. `idle` ends connections by the broker's time
/// limit, and some requests are sent about then; `stop` waits for the end of the daemon; with `half`
/// clients end their side first, before the last response has come, or after that.
const CLIENTS: &str = r#"
import os, random, select, socket, sys, threading, time
address, how = (sys.argv[1], int(sys.argv[2])), sys.argv[3]
CLIENTS, ROUNDS, PATIENCE = 24, {"idle": 8, "half": 40, "stop": 1}[how], 30
# A blocking reader in the kernel's map is told EAGAIN when its connection changes state.
KINDS = ("level", "edge") if how == "half" else ("blocking", "level", "edge")
answered, well, wrong = threading.Semaphore(0), [], []

class Ended(Exception): pass

def reader(kind, s):
    """A function that returns what is there, waiting for it; b"" is the end."""
    if kind == "blocking":
        s.settimeout(None)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, PATIENCE.to_bytes(8, "little") + bytes(8))
        return lambda: s.recv(65536)
    s.setblocking(False)
    epoll = select.epoll()
    epoll.register(s, select.EPOLLIN | (select.EPOLLET if kind == "edge" else 0))
    def read():
        if kind == "edge":
            try: return s.recv(65536)
            except BlockingIOError: pass
        while True:
            if not epoll.poll(PATIENCE): raise Exception("nothing comes, and no end")
            try: return s.recv(65536)
            except BlockingIOError: pass
    return read

def response(read, got, wanted):
    while True:
        head, there, body = got.partition(b"\r\n\r\n")
        if there:
            length = int(head.lower().split(b"content-length:")[1].split()[0])
            if len(body) >= length:
                assert wanted in head, (wanted, head)
                return body[length:]
        piece = read()
        if not piece:
            if got: raise Exception(f"cut off after {got!r}")
            raise Ended
        got += piece

def connection(kind, name):
    s = socket.create_connection(address, timeout=PATIENCE)
    read, left = reader(kind, s), b""
    requests, early = random.randrange(1, 4), random.random() < 0.5
    for n in range(requests):
        if n:
            late = how == "idle" and random.random() < 0.5
            time.sleep(random.uniform(0.19, 0.24) if late else random.uniform(0, 0.01))
        wanted = f"{name}-{n}".encode()
        try:
            path = random.choice([b"/echo", b"/128", b"/64k"])
            s.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: test\r\nX-Request-Id: " + wanted + b"\r\n\r\n")
            if how == "half" and early and n == requests - 1: s.shutdown(socket.SHUT_WR)
            left = response(read, left, wanted)
        except (Ended, ConnectionError):
            # Where the processor is busy any request may be late.
            if how == "idle": return
            raise
        assert not left, left
    answered.release()
    if how == "half" and not early: s.shutdown(socket.SHUT_WR)
    got = read()
    assert not got, f"after the last response: {got!r}"
    time.sleep(0.02)
    s.setblocking(False)
    assert not s.recv(65536), "after the end"
    well.append(name)

def client(i):
    kind = KINDS[i % len(KINDS)]
    for n in range(ROUNDS):
        try: connection(kind, f"id-{i}-{n}")
        except BaseException as e: wrong.append(f"{kind}: {e!r}")

threads = [threading.Thread(target=client, args=(i,)) for i in range(CLIENTS)]
for t in threads: t.start()
if how == "stop":
    for _ in range(CLIENTS): answered.acquire()
    print("all answered", flush=True)
for t in threads: t.join()
if len(well) < CLIENTS * ROUNDS / 4: wrong.append(f"{len(well)} connections have lasted to their end")
print("\n".join(wrong) or "all ended well")
"#;

/// More processes that use the processor than there are processors.
fn hogs() -> Vec<Process> {
    let hog = || Launch::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
    let processors = std::thread::available_parallelism().unwrap().get();
    std::iter::repeat_with(hog).take(2 * processors).collect()
}

fn daemon(lab: &Lab, steer: &str, client_idle: &str) -> Daemon {
    let config = format!(
        "workers = 2\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\nsteer = {steer:?}\n\
         intercept = [\"origins\"]\norigins = {}\n[service.pool]\nprewarm = 16\n\
         [service.timeouts]\nclient_idle = {client_idle:?}\n",
        addresses(&lab.all_origins())
    );
    Daemon::start(lab, &config).unwrap()
}

fn clients(lab: &Lab, how: &str) -> Process {
    let (ip, port) = (lab.origin(0).ip().to_string(), lab.origin(0).port().to_string());
    lab.client("/usr/bin/python3").args(["-c", CLIENTS, &ip, &port, how]).spawn().unwrap()
}

#[track_caller]
fn assert_well_ended(mut clients: Process) {
    let status = clients.wait(Duration::from_mins(2)).unwrap();
    let said = clients.stdout();
    assert!(status.success() && said.ends_with("all ended well\n"), "{said}{}", clients.stderr());
}

/// Clients of a service that ends their connections after `client_idle`.
#[track_caller]
fn check(how: &str, client_idle: &str) {
    for steer in ["kernel", "auto"] {
        let lab = Lab::new(1).unwrap();
        let _origin = nginx::origin(&lab, 0).unwrap();
        let daemon = daemon(&lab, steer, client_idle);
        let _hogs = hogs();
        assert_well_ended(clients(&lab, how));
        let service = daemon.service().unwrap();
        assert!(service.steered * 4 > service.exchanges, "{steer}: {:?}", service.not_steered);
    }
}

#[test]
fn clients_that_were_idle_for_too_long_get_everything_and_then_the_end() {
    check("idle", "200ms");
}

#[test]
fn clients_that_end_their_side_get_everything_and_then_the_end() {
    check("half", "1m");
}

#[test]
fn clients_of_a_daemon_that_stops_get_everything_and_then_the_end() {
    for steer in ["kernel", "auto"] {
        let lab = Lab::new(1).unwrap();
        let _origin = nginx::origin(&lab, 0).unwrap();
        let daemon = daemon(&lab, steer, "1m");
        let _hogs = hogs();
        let clients = clients(&lab, "stop");
        eventually(SOON, "all are answered", || clients.stdout().contains("all answered"));
        assert!(daemon.service().unwrap().steered > 0);
        daemon.stop().unwrap();
        assert_well_ended(clients);
    }
}

//! What the standard library and nix do not offer in safe functions.

use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};
use std::sync::{OnceLock, mpsc};
use std::thread;

use nix::libc;

/// Has `command`'s child run `hook` before it becomes the program.
///
/// The hook runs between fork and exec of a process with many threads: it may only make system
/// calls, on things that were opened and allocated beforehand.
#[expect(unsafe_code, reason = "`pre_exec` is the only way to prepare a child before its program")]
pub(crate) fn before_exec(
    command: &mut Command,
    hook: impl FnMut() -> io::Result<()> + Send + Sync + 'static,
) {
    // SAFETY: `pre_exec` asks that the hook be async-signal-safe. All hooks of this crate (see
    // `process.rs`) do nothing but prctl, setns and write, on descriptors that were opened before
    // the fork; they do not allocate and take no lock.
    unsafe { command.pre_exec(hook) };
}

type Job = Box<dyn FnOnce() + Send>;

/// Starts `command` from a thread that lives as long as this process.
///
/// `PR_SET_PDEATHSIG` tells of the death of the parent *thread*. A child started by a test's own
/// thread, or by a helper thread, would be killed when that thread ends.
pub(crate) fn spawn_from_lasting_thread(mut command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<mpsc::Sender<Job>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (jobs, queue) = mpsc::channel::<Job>();
        thread::Builder::new()
            .name("spawner".into())
            .spawn(move || queue.iter().for_each(|job| job()))
            .expect("the process can start a thread");
        jobs
    });
    let (answer, result) = mpsc::channel();
    let job: Job = Box::new(move || {
        // The receiver waits below, so the send cannot fail.
        answer.send(command.spawn()).expect("the caller waits for the child");
    });
    spawner.send(job).map_err(|_gone| io::Error::other("the spawning thread has ended"))?;
    result.recv().map_err(io::Error::other)?
}

/// Ends a connection by RST, although other handles to the socket are still open (closing with
/// `SO_LINGER` 0 would do so only once the last handle is gone).
#[expect(unsafe_code, reason = "no safe function connects to AF_UNSPEC")]
pub(crate) fn reset(stream: &TcpStream) -> io::Result<()> {
    let unspecified = libc::sockaddr { sa_family: 0, sa_data: [0; 14] };
    let length = libc::socklen_t::try_from(size_of_val(&unspecified)).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open for as long as `stream` is borrowed, and the kernel reads
    // `length` bytes of `unspecified`, which is that long. connect(2) to AF_UNSPEC dissolves the
    // association; for an established TCP socket that is a reset.
    let result = unsafe { libc::connect(stream.as_raw_fd(), &raw const unspecified, length) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes a TUN device in this thread's network namespace. It is there for as long as the file, from which
/// packets that it is to send are read, without waiting, and to which those are written that it receives.
#[expect(unsafe_code, reason = "a device is made by an ioctl")]
pub(crate) fn tun(name: &str) -> io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")?;
    // SAFETY: integers and a union of such: all zero is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *place = byte.cast_signed();
    }
    request.ifr_ifru.ifru_flags =
        libc::c_short::try_from(libc::IFF_TUN | libc::IFF_NO_PI).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open, and the request reads and writes one `ifreq`, which is there.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if result == 0 { Ok(file) } else { Err(io::Error::last_os_error()) }
}

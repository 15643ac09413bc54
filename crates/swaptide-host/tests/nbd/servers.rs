//! Real servers for the tests: nbdkit and qemu-nbd, where they are installed (`./check` installs
//! them).

use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A directory of one test, removed when it ends.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir()
            .join(format!("swaptide-nbd-{name}-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory for the test");
        Scratch(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A file of `bytes` zeros.
    pub fn file(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.path(name);
        std::fs::File::create(&path)
            .and_then(|file| file.set_len(bytes))
            .expect("a file for the server");
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Whether a server can be tested. Says so where not; under `./check`, which installs it, that is a
/// failure.
pub fn have(program: &str) -> bool {
    let found = Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok();
    assert!(
        found || std::env::var_os("SWAPTIDE_TEST_ALL").is_none(),
        "{program} is not installed: run ./check"
    );
    if !found {
        eprintln!("skipped: {program} is not installed");
    }
    found
}

/// A server on a Unix socket. Lives as long as the thread that started it, at most.
pub struct Server {
    child: Child,
    program: &'static str,
    args: Vec<String>,
    socket: PathBuf,
}

impl Server {
    /// nbdkit with these arguments.
    pub fn nbdkit(scratch: &Scratch, args: &[&str]) -> Server {
        let socket = scratch.path("nbdkit.sock");
        let mut all = vec!["-f".to_owned(), "-U".to_owned(), socket.display().to_string()];
        all.extend(args.iter().map(|arg| (*arg).to_owned()));
        Server::start("nbdkit", all, socket)
    }

    /// qemu-nbd with these arguments.
    pub fn qemu(scratch: &Scratch, args: &[&str]) -> Server {
        let socket = scratch.path("qemu.sock");
        let mut all = vec!["-t".to_owned(), "-k".to_owned(), socket.display().to_string()];
        all.extend(args.iter().map(|arg| (*arg).to_owned()));
        Server::start("qemu-nbd", all, socket)
    }

    fn start(program: &'static str, args: Vec<String>, socket: PathBuf) -> Server {
        let child = spawn(program, &args, &socket);
        Server { child, program, args, socket }
    }

    /// The URL of an export, with more options.
    pub fn url(&self, scheme: &str, export: &str, options: &str) -> String {
        format!("{scheme}+unix:///{export}?socket={}{options}", self.socket.display())
    }

    /// As a machine dies: no farewell.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub fn start_again(&mut self) {
        self.kill();
        self.child = spawn(self.program, &self.args, &self.socket);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(program: &str, args: &[String], socket: &Path) -> Child {
    let _ = std::fs::remove_file(socket);
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stderr(Stdio::null());
    // SAFETY: one system call, which allocates nothing.
    unsafe {
        command.pre_exec(|| {
            // A test that is killed leaves no server behind.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{program}: {error}"));
    let deadline = Instant::now() + Duration::from_secs(30);
    while UnixStream::connect(socket).is_err() {
        if let Ok(Some(status)) = child.try_wait() {
            panic!("{program} {args:?}: {status}");
        }
        assert!(Instant::now() < deadline, "{program} does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}

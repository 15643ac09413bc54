//! What the tests of this crate share: a segment, and a directory that goes away.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// An empty segment.
pub(crate) fn segment() -> &'static swaptide_ipc::Segment {
    use swaptide_ipc::Segment;
    let fd = swaptide_sys::mem::memfd_create(c"test", Segment::BYTES as u64).expect("memfd");
    let map = swaptide_sys::mem::SharedMap::map(std::os::fd::AsFd::as_fd(&fd), Segment::BYTES)
        .expect("map");
    Segment::raw(map).expect("segment")
}

/// A process that is killed when the test ends.
pub(crate) struct Killed(pub(crate) std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A directory of one test, removed when it ends.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Scratch {
        let number = NUMBER.fetch_add(1, Relaxed);
        let path = std::env::temp_dir()
            .join(format!("swaptide-test-{name}-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory for the test");
        Scratch(path)
    }

    pub(crate) fn root(&self) -> &Path {
        &self.0
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// An executable file.
    pub(crate) fn program(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).expect("write");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("chmod");
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

//! Which sockets a client trusts: `ctl`, `top`, and a run that looks for a daemon.
//!
//! A daemon hands out the segment, which holds the key of all that is swapped, and the swap areas.
//! Another user may have made the directory of the sockets first: without `XDG_RUNTIME_DIR` it is
//! in `/tmp`.
//!
//! Invariants
//! 1. A socket is used only in a directory that is no link and that only its owner can write to.
//!    The owner is this user or root. Root may also inspect a user's runs, but joins no user's
//!    daemon ([`PeerPurpose`]).
//! 2. Nothing is sent before the kernel has said that the owner of that directory, or root, listens
//!    there (`SO_PEERCRED`).
//! 3. A segment that comes from a daemon is a memory file of this user or of root, has a segment's
//!    size, and cannot be cut ([`is_sound_segment`]).
//!
//! Locks: none.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::fs::SealFlags;
use swaptide_ipc::Segment;
use swaptide_sys::sock::peer_of;

const ROOT: u32 = 0;

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerPurpose {
    /// To inspect and control.
    Ask,
    /// To have a run kept by the daemon there.
    Join,
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Why a socket or a directory is not trusted.
#[derive(Debug, thiserror::Error)]
#[error("{0}; set XDG_RUNTIME_DIR or SWAPTIDE_DIRECTORY to a directory of your own")]
struct Untrusted(String);

fn refused(why: impl Into<String>) -> io::Error {
    io::Error::other(Untrusted(why.into()))
}

/// True if an error says that a socket is not trusted, and not that nothing listens there.
pub(crate) fn is_refusal(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<Untrusted>())
}

/// Makes sure that a directory is this user's alone; makes it, if it is not there.
///
/// # Errors
/// That it is not, or what the kernel answers.
pub(crate) fn own(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    match owner_of(directory)? {
        owner if owner == own_uid() => Ok(()),
        _ => Err(refused("is another user's directory")),
    }
}

/// The only user who can make sockets in a directory.
fn owner_of(directory: &Path) -> io::Result<u32> {
    let found = std::fs::symlink_metadata(directory)?;
    let open = if found.uid() == own_uid() { 0o077 } else { 0o022 };
    if !found.is_dir() {
        Err(refused("is no directory"))
    } else if found.mode() & open != 0 {
        Err(refused("is open to others: chmod 700 closes it"))
    } else {
        Ok(found.uid())
    }
}

/// True if a directory is this user's alone, so that sockets left behind there may be removed.
pub(crate) fn is_own(directory: &Path) -> bool {
    owner_of(directory).is_ok_and(|owner| owner == own_uid())
}

/// Makes sure that sockets in a directory can be trusted for a purpose; answers with their owner.
///
/// # Errors
/// Why not; `NotFound` where there is none.
pub(crate) fn look(directory: &Path, purpose: PeerPurpose) -> io::Result<u32> {
    let owner = owner_of(directory)?;
    let root_asks = own_uid() == ROOT && purpose == PeerPurpose::Ask;
    if owner == own_uid() || owner == ROOT || root_asks {
        Ok(owner)
    } else {
        Err(refused("is another user's directory, whose daemon could read what is swapped"))
    }
}

/// Connects to a socket that can be trusted for a purpose.
///
/// # Errors
/// Why it cannot ([`is_refusal`]), or what the kernel answers.
pub(crate) fn connect(path: &Path, purpose: PeerPurpose) -> io::Result<UnixStream> {
    let owner = look(path.parent().unwrap_or(Path::new("/")), purpose)?;
    let stream = UnixStream::connect(path)?;
    let peer = peer_of(stream.as_fd())?.uid;
    if peer == owner || peer == ROOT {
        Ok(stream)
    } else {
        Err(refused(format!("user {peer} answers there, whose directory it is not")))
    }
}

/// True if a file has a segment's size, belongs to one of these users, and cannot be cut. Cutting
/// it would end every process that has it mapped.
pub(crate) fn is_sound_segment(file: &File, owners: &[u32]) -> bool {
    let sealed = rustix::fs::fcntl_get_seals(file)
        .is_ok_and(|seals| seals.contains(SealFlags::SHRINK | SealFlags::SEAL));
    let right = |found: std::fs::Metadata| {
        found.is_file() && owners.contains(&found.uid()) && found.len() == Segment::BYTES as u64
    };
    sealed && file.metadata().is_ok_and(right)
}

/// The same for one that a daemon has handed over.
pub(crate) fn is_sound_for_joining(file: &File) -> bool {
    is_sound_segment(file, &[own_uid(), ROOT])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    use std::os::unix::net::UnixListener;

    use crate::testing::Scratch;

    fn assert_refused<T>(result: io::Result<T>) {
        let error = result.map(drop).expect_err("it is refused");
        assert!(is_refusal(&error), "{error}");
    }

    #[test]
    fn a_directory_that_others_may_enter_is_refused() {
        let scratch = Scratch::new("trust");
        let open = scratch.path("open");
        std::fs::create_dir(&open).expect("directory");
        std::fs::set_permissions(&open, PermissionsExt::from_mode(0o755)).expect("mode");
        assert!(own(&open).is_err() && !is_own(&open));
        let mine = scratch.path("mine");
        own(&mine).expect("made");
        own(&mine).expect("found");
        let link = scratch.path("link");
        symlink(&mine, &link).expect("link");
        assert!(own(&link).is_err(), "the owner of the link may change where it leads");
    }

    #[test]
    fn sockets_are_not_trusted_where_others_can_make_them() {
        let scratch = Scratch::new("trust-connect");
        let mine = scratch.path("mine");
        let socket = mine.join("daemon.sock");
        let missing = connect(&socket, PeerPurpose::Join).map(drop).expect_err("there is nothing");
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        own(&mine).expect("made");
        let _listener = UnixListener::bind(&socket).expect("a socket");
        for purpose in [PeerPurpose::Ask, PeerPurpose::Join] {
            connect(&socket, purpose).expect("this user's");
            let link = scratch.path("link");
            let _ = symlink(&mine, &link);
            assert_refused(connect(&link.join("daemon.sock"), purpose));
            std::fs::set_permissions(&mine, PermissionsExt::from_mode(0o770)).expect("mode");
            assert_refused(connect(&socket, purpose));
            std::fs::set_permissions(&mine, PermissionsExt::from_mode(0o700)).expect("mode");
        }
        // Only root can give a directory away.
        if own_uid() == ROOT {
            chown(&mine, Some(12345), None).expect("owner");
            connect(&socket, PeerPurpose::Ask).expect("root may inspect all");
            assert_refused(connect(&socket, PeerPurpose::Join));
            assert!(own(&mine).is_err() && !is_own(&mine));
        }
    }

    #[test]
    fn a_segment_that_can_be_cut_or_is_anothers_is_not_taken() {
        let memory =
            |bytes| File::from(swaptide_sys::mem::memfd_create(c"test", bytes).expect("memfd"));
        let sound = memory(Segment::BYTES as u64);
        assert!(is_sound_for_joining(&sound) && !is_sound_segment(&sound, &[12345]));
        assert!(!is_sound_for_joining(&memory(4096)));
        let scratch = Scratch::new("trust-segment");
        let file = File::create_new(scratch.path("file")).expect("file");
        file.set_len(Segment::BYTES as u64).expect("length");
        assert!(!is_sound_for_joining(&file), "it has no seals");
    }
}

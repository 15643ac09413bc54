//! What the host gives to a container: the command, the agent, the device, the daemon's sockets.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use swaptide_sys::elf::{ProgramKind, kind_of};

use crate::control::server::{daemon_path, directory};
use crate::oci::error::OciError;
use crate::run::agent::find_agent;

/// The device that userfaultfds come from.
pub(super) const DEVICE: &str = "/dev/userfaultfd";

/// What there is on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostParts {
    /// The command, linked statically.
    pub(super) command: PathBuf,
    /// The agent's library.
    pub(super) agent: PathBuf,
    /// Major and minor number of the device.
    pub(super) device: (u32, u32),
    /// The directory of the daemon's socket, where one is there.
    pub(super) sockets: Option<PathBuf>,
}

impl HostParts {
    /// Looks at what there is.
    ///
    /// # Errors
    /// What is missing.
    pub(super) fn find() -> Result<HostParts, OciError> {
        let command = std::env::current_exe()
            .map_err(|error| OciError::File("/proc/self/exe".into(), error))?;
        check_static(&command)?;
        let agent = find_agent().map_err(|error| OciError::Host(error.to_string()))?;
        Ok(HostParts {
            command,
            agent,
            device: device()?,
            sockets: daemon_path().exists().then(directory),
        })
    }
}

/// An image may have no loader for anything else.
fn check_static(command: &Path) -> Result<(), OciError> {
    let file = File::open(command).map_err(|error| OciError::File(command.into(), error))?;
    if kind_of(file.as_fd()) == Some(ProgramKind::Static) {
        return Ok(());
    }
    Err(OciError::Host(format!(
        "{}: loads libraries that an image may not have; install the one that is linked statically \
        (docs/containers.md)",
        command.display()
    )))
}

fn device() -> Result<(u32, u32), OciError> {
    let found = std::fs::metadata(DEVICE).ok().filter(|file| file.file_type().is_char_device());
    let number = found.map(|found| found.rdev()).ok_or_else(|| {
        OciError::Host(format!("{DEVICE} is not there; swaptide doctor on the host says why"))
    })?;
    Ok((rustix::fs::major(number), rustix::fs::minor(number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_loads_libraries_is_refused() {
        let this = std::env::current_exe().expect("this program");
        let error = check_static(&this).expect_err("a test loads libc").to_string();
        assert!(error.contains("statically") && !error.contains('\n'), "{error}");
        assert!(check_static(Path::new("/no/such/file")).is_err());
    }
}

//! Where the preloaded library is.

use std::path::{Path, PathBuf};

use crate::run::error::{AGENT_NAME, ENV_AGENT, RunError};

/// The preloaded library: the one that is named, or in the directory of this executable, or in the
/// library directory next to that.
///
/// # Errors
/// [`RunError::NoAgent`].
pub(crate) fn find_agent() -> Result<PathBuf, RunError> {
    let places = match std::env::var_os(ENV_AGENT).filter(|path| !path.is_empty()) {
        Some(path) => vec![PathBuf::from(path)],
        None => {
            let exe = std::env::current_exe()
                .map_err(|error| RunError::System("own executable", error))?;
            let directory = exe.parent().unwrap_or(Path::new("/"));
            vec![directory.join(AGENT_NAME), directory.join("../lib/swaptide").join(AGENT_NAME)]
        }
    };
    // The tree's processes may be in any directory.
    let found = places
        .iter()
        .find(|place| place.is_file())
        .and_then(|place| std::fs::canonicalize(place).ok());
    found.ok_or(RunError::NoAgent(places))
}

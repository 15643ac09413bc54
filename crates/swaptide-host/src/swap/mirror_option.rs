//! What `,mirror=` says.

use std::path::PathBuf;

use crate::swap::error::{DeviceError, MAX_FILE_BYTES, MIN_FILE_BYTES};
use crate::units::parse_bytes;

/// The value of `,mirror=`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mirror {
    /// At a path of its own.
    Place {
        /// A directory, or the file's own path.
        path: PathBuf,
        /// The most it may take.
        bytes: Option<u64>,
    },
    /// In the directory of the swap file of the highest priority in a tier.
    Tier(String),
}

impl Mirror {
    /// Reads what stands behind `,mirror=`: a text with a slash is a place. `whole` is the device's
    /// text, for errors.
    ///
    /// # Errors
    /// See [`DeviceError`].
    pub fn parse(whole: &str, text: &str) -> Result<Mirror, DeviceError> {
        let wrong = || {
            DeviceError::Mirror(
                whole.to_owned(),
                "expected a directory, a file or the name of a tier after mirror=".into(),
            )
        };
        if text.is_empty() {
            return Err(wrong());
        }
        if !text.contains('/') {
            return Ok(Mirror::Tier(text.to_owned()));
        }
        match text.rsplit_once(':') {
            Some((path, tail)) if !path.is_empty() && !tail.contains('/') => {
                let bytes = parse_bytes(tail)
                    .map_err(|error| DeviceError::Size(whole.to_owned(), error))?;
                if bytes < MIN_FILE_BYTES {
                    return Err(DeviceError::TooSmall(whole.to_owned(), MIN_FILE_BYTES));
                }
                if bytes > MAX_FILE_BYTES {
                    return Err(DeviceError::TooLarge(whole.to_owned()));
                }
                Ok(Mirror::Place { path: path.into(), bytes: Some(bytes) })
            }
            _ => Ok(Mirror::Place { path: text.into(), bytes: None }),
        }
    }
}

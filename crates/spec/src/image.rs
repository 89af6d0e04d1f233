//! What an image shows of the host.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The `host` image: directories and files of the host that every cell shows read-only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostImage {
    /// Name of the image.
    pub name: String,
    /// Absolute paths of directories. One that is a symbolic link on the host becomes the same
    /// link; one that does not exist is left out.
    pub directories: Vec<String>,
    /// Names below `/etc` that are shown. One that does not exist is left out.
    pub etc: Vec<String>,
}

/// Why an image's description was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ImageError {
    /// Not TOML, or an unknown key.
    #[error("image description: {0}")]
    Syntax(String),
    /// A path is not of the allowed form.
    #[error("image description: {path:?} must be {rule}")]
    Path {
        /// The path.
        path: String,
        /// What it must be.
        rule: &'static str,
    },
}

impl HostImage {
    /// Reads the text of an `image.toml`.
    pub fn parse(text: &str) -> Result<Self, ImageError> {
        let image: HostImage = toml::from_str(text)
            .map_err(|error| ImageError::Syntax(error.to_string().trim().to_owned()))?;
        let plain = |path: &str| path.split('/').all(|part| !matches!(part, "" | "." | ".."));
        for path in &image.directories {
            if !path.strip_prefix('/').is_some_and(plain) {
                let rule = "a plain absolute path";
                return Err(ImageError::Path { path: path.clone(), rule });
            }
        }
        for path in &image.etc {
            if !plain(path) {
                let rule = "a plain path below /etc";
                return Err(ImageError::Path { path: path.clone(), rule });
            }
        }
        Ok(image)
    }
}

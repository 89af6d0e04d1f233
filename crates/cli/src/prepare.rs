//! What a daemon is started with: policy and image.

use std::fmt;
use std::path::{Path, PathBuf};

use cofferdam_spec::{HostImage, Policy, PolicyProblem};
use thiserror::Error;

use crate::args::Image;

/// Largest policy file: far above any that a person writes.
const POLICY_BYTES_MAX: u64 = 1024 * 1024;

/// Why the policy cannot be used.
#[derive(Debug, Error)]
pub(crate) enum PolicyError {
    /// The file cannot be read.
    #[error("read policy {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The file is too large to be a policy.
    #[error("policy {path} is {bytes} bytes long, the limit is {POLICY_BYTES_MAX}")]
    TooLarge { path: PathBuf, bytes: u64 },
    /// Its contents are refused.
    #[error("policy {path}:{problems}")]
    Problems { path: PathBuf, problems: Problems },
}

/// Every problem of a policy, one a line.
#[derive(Debug)]
pub(crate) struct Problems(Vec<PolicyProblem>);

impl fmt::Display for Problems {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|problem| {
            write!(out, "\n  {}", problem.to_string().replace('\n', "\n  "))
        })
    }
}

/// Reads the policy, once: a file that lies in the workspace can change afterwards.
pub(crate) fn policy(path: Option<&Path>) -> Result<Policy, PolicyError> {
    let Some(path) = path else { return Ok(Policy::default()) };
    let unreadable = |source| PolicyError::Read { path: path.to_owned(), source };
    let bytes = std::fs::metadata(path).map_err(unreadable)?.len();
    if bytes > POLICY_BYTES_MAX {
        return Err(PolicyError::TooLarge { path: path.to_owned(), bytes });
    }
    let text = std::fs::read_to_string(path).map_err(unreadable)?;
    Policy::parse(&text).map_err(|problems| PolicyError::Problems {
        path: path.to_owned(),
        problems: Problems(problems),
    })
}

/// The image's description, which is part of this program.
pub(crate) fn image(image: Image) -> HostImage {
    let text = match image {
        Image::Host => include_str!("../../../sandbox-images/host/image.toml"),
    };
    HostImage::parse(text).expect("a test reads every image of this program")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_images_can_be_read() {
        assert_eq!(image(Image::Host).name, "host");
    }

    #[test]
    fn every_problem_of_a_policy_is_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("policy.toml");
        std::fs::write(&path, "cell.uid = 0\ntmp_bytes = 1\n").unwrap();
        let text = policy(Some(&path)).unwrap_err().to_string();
        assert!(text.contains("\n  cell.uid = 0: must be an unprivileged user id"), "{text}");
        assert!(text.contains("\n  tmp_bytes = 1: must be 0 or at least 65536"), "{text}");
    }
}

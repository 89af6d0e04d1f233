//! Callers for the tests of this crate.

use std::os::fd::OwnedFd;

use crate::call::Answer;
use crate::serve::{Gone, Reply};

/// A caller who waits, and throws answers away.
pub(crate) struct Waiting;

impl Reply for Waiting {
    fn send(&self, _: Answer, _: Option<OwnedFd>) -> Result<(), Gone> {
        Ok(())
    }

    fn is_wanted(&self) -> bool {
        true
    }
}

/// A caller who has gone.
pub(crate) struct Nobody;

impl Reply for Nobody {
    fn send(&self, _: Answer, _: Option<OwnedFd>) -> Result<(), Gone> {
        Err(Gone)
    }

    fn is_wanted(&self) -> bool {
        false
    }
}

//! The steps of a change, where tests stop it, or make the kernel refuse.

use rustix::io::Errno;

/// A step of a change that is about to be done. In this order, though no change does all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Note in an intent what is going to be done.
    NoteIntent,
    /// Make the temporary file.
    MakeTemporary,
    /// Write a part of the new content to the temporary file.
    Fill,
    /// Copy mode, owner and attributes.
    CopyAttributes,
    /// Write the temporary file through to the disk.
    SyncTemporary,
    /// Note that the temporary file is complete.
    NoteComplete,
    /// Give the temporary file the name of a file that does not exist.
    Place,
    /// Exchange the temporary file and the target.
    Exchange,
    /// Look at what the temporary name holds after the exchange.
    Judge,
    /// Exchange them back.
    ExchangeBack,
    /// Look at what the temporary name holds after that.
    JudgeAgain,
    /// Move what must not be lost to where conflicts are kept.
    Keep,
    /// Remove the temporary file.
    RemoveTemporary,
    /// Write the directory through to the disk.
    SyncDirectory,
    /// Save the old content before a write in place.
    SaveOld,
    /// Look at the target once more before it is written in place.
    JudgeTarget,
    /// Write a part of the new content in place.
    WriteInPlace,
    /// Cut what is left of the old content.
    Truncate,
    /// Write the target through to the disk.
    SyncTarget,
    /// Put the old content back after a write in place that failed.
    Restore,
    /// Forget the old content that was saved.
    RemoveSaved,
    /// Give what is removed or moved another name.
    Rename,
    /// Remove the intent.
    ForgetIntent,
}

/// Told before each step.
#[derive(Default)]
pub(crate) struct Steps {
    #[cfg(test)]
    #[allow(clippy::type_complexity, reason = "a test's closure, named nowhere else")]
    pub(crate) before: Option<Box<dyn Fn(Step) -> Result<(), Errno> + Send + Sync>>,
}

impl Steps {
    /// Says that `step` comes next. A test may refuse it as the kernel would.
    pub(crate) fn before(&self, step: Step) -> Result<(), Errno> {
        #[cfg(test)]
        if let Some(before) = &self.before {
            return before(step);
        }
        let _ = step;
        Ok(())
    }
}

impl std::fmt::Debug for Steps {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Steps")
    }
}

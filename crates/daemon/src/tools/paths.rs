//! Paths as a model gives them.

use cofferdam_spec::PATH_BYTES_MAX;

use crate::tools::errors::ToolError;

/// Where the programs of the cell have their home.
const HOME: &str = "/home/agent";

/// Where tools look without a path.
pub(crate) const WORKSPACE: &str = "/workspace";

/// An absolute path of the cell. What lies behind it is the kernel's to say: nothing else is
/// changed.
pub(crate) fn absolute(field: &str, given: &str) -> Result<String, ToolError> {
    if given.len() > PATH_BYTES_MAX {
        return Err(ToolError::new(
            "INVALID_INPUT",
            format!(
                "{field} is {} bytes long, the limit of a path is {PATH_BYTES_MAX}.",
                given.len()
            ),
            "Nothing was done.",
        ));
    }
    without_nul(field, given)?;
    if let Some(rest) = given.strip_prefix("$HOME/") {
        return Ok(format!("{HOME}/{rest}"));
    }
    if given.starts_with('/') {
        return Ok(given.to_owned());
    }
    Err(ToolError::new(
        "INVALID_INPUT",
        format!(
            "{field} must be an absolute path. Received: \"{given}\". Use an absolute path such as \
             /workspace/foo.ts or a path beginning with $HOME/."
        ),
        "Nothing was done. The workspace is /workspace.",
    ))
}

/// Refuses a text with a NUL, which no argument of a program and no name of a file can carry.
pub(crate) fn without_nul(field: &str, text: &str) -> Result<(), ToolError> {
    match text.bytes().position(|byte| byte == 0) {
        None => Ok(()),
        Some(index) => Err(ToolError::new(
            "INVALID_INPUT",
            format!("{field} holds a NUL character at byte {index}, which is not allowed."),
            "Nothing was done.",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absolute_paths_and_the_home_are_taken_as_they_are() {
        let table = [
            ("/workspace/../etc/$HOME//x ", "/workspace/../etc/$HOME//x "),
            ("$HOME/a", "/home/agent/a"),
            ("/", "/"),
        ];
        for (given, expected) in table {
            assert_eq!(absolute("path", given).unwrap(), expected);
        }
    }

    #[test]
    fn relative_paths_are_refused_with_the_known_sentence() {
        for given in ["", ".", "foo.ts", "~/x", "$HOME", "$HOMEx/y"] {
            let error = absolute("filePath", given).unwrap_err();
            assert_eq!(
                error.message,
                format!(
                    "filePath must be an absolute path. Received: \"{given}\". Use an absolute \
                    path such as /workspace/foo.ts or a path beginning with $HOME/."
                )
            );
        }
    }

    #[test]
    fn a_nul_and_a_path_without_end_are_refused() {
        for given in ["/a\0b".to_owned(), format!("/{}", "x".repeat(PATH_BYTES_MAX))] {
            let error = absolute("path", &given).unwrap_err();
            assert_eq!(error.code, "INVALID_INPUT");
            assert!(error.message.len() < 200, "{}", error.message);
        }
    }
}

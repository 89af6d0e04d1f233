//! Calls of tools as a model makes them, and what comes back.

use std::time::Duration;

use cofferdam_proto::v1;
use serde_json::Value;

/// The answer of a tool, with the time it took as the client saw it.
#[derive(Debug)]
pub struct ToolReply {
    /// What the model sees.
    pub json: Value,
    /// Whether the tool refused or failed.
    pub is_error: bool,
    /// What is enforced.
    pub enforcement: Option<v1::Enforcement>,
    /// From call to answer.
    pub took: Duration,
}

/// What a tool says when it refuses or fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolError {
    /// For programs.
    pub code: String,
    /// For the model.
    pub message: String,
    /// What to do about it; empty when nothing is known.
    pub hint: String,
}

impl ToolReply {
    /// Takes a response apart; its JSON must be an object.
    pub fn new(response: v1::CallToolResponse, took: Duration) -> ToolReply {
        let json: Value = serde_json::from_str(&response.output_json)
            .unwrap_or_else(|error| panic!("{error}: {}", cut(&response.output_json)));
        assert!(json.is_object(), "the output is an object: {}", cut(&response.output_json));
        ToolReply { json, is_error: response.is_error, enforcement: response.enforcement, took }
    }

    /// Asserts that the tool did what was asked.
    #[track_caller]
    pub fn ok(&self) -> &Self {
        assert!(!self.is_error, "{}", self.describe());
        assert!(self.json.get("error").is_none(), "{}", self.describe());
        self
    }

    /// Asserts that the tool refused or failed in the form that is promised, and takes its words.
    #[track_caller]
    pub fn err(&self) -> ToolError {
        assert!(self.is_error, "an error is expected: {}", self.describe());
        let error = self.json.get("error").and_then(Value::as_object);
        let error = error.unwrap_or_else(|| panic!("no error object: {}", self.describe()));
        assert_eq!(self.json.as_object().map(|all| all.len()), Some(1), "{}", self.describe());
        let text =
            |name: &str| error.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        let error = ToolError { code: text("code"), message: text("message"), hint: text("hint") };
        assert!(!error.code.is_empty() && error.message.len() > 3, "{}", self.describe());
        error
    }

    /// Asserts that the tool refused or failed, and that its words hold `part`.
    #[track_caller]
    pub fn err_with(&self, part: &str) -> ToolError {
        let error = self.err();
        assert!(error.message.contains(part), "{part:?} in {error:?}");
        error
    }

    /// Asserts an upper limit of the time; see [`crate::within`].
    #[track_caller]
    pub fn expect_within(&self, seconds: f64) -> &Self {
        let limit = crate::within(seconds);
        assert!(self.took < limit, "took {:?}, limit {limit:?}: {}", self.took, self.describe());
        self
    }

    /// A text of the answer.
    #[track_caller]
    pub fn text(&self, field: &str) -> &str {
        let text = self.json.get(field).and_then(Value::as_str);
        text.unwrap_or_else(|| panic!("no text {field}: {}", self.describe()))
    }

    /// A text of the answer, empty where there is none.
    pub fn text_or_empty(&self, field: &str) -> &str {
        self.json.get(field).and_then(Value::as_str).unwrap_or_default()
    }

    /// A number of the answer.
    #[track_caller]
    pub fn number(&self, field: &str) -> u64 {
        let number = self.json.get(field).and_then(Value::as_u64);
        number.unwrap_or_else(|| panic!("no number {field}: {}", self.describe()))
    }

    /// A number of the answer, where there is one.
    pub fn number_if_any(&self, field: &str) -> Option<u64> {
        self.json.get(field).and_then(Value::as_u64)
    }

    /// A yes or no of the answer.
    #[track_caller]
    pub fn flag(&self, field: &str) -> bool {
        let flag = self.json.get(field).and_then(Value::as_bool);
        flag.unwrap_or_else(|| panic!("no flag {field}: {}", self.describe()))
    }

    /// How many entries a search skipped for one reason.
    #[track_caller]
    pub fn skipped(&self, reason: &str) -> u64 {
        let skipped = self.json.get("skipped").and_then(|all| all.get(reason));
        skipped
            .and_then(Value::as_u64)
            .unwrap_or_else(|| panic!("no skipped.{reason}: {}", self.describe()))
    }

    /// Lines of `content` before the footer, which a blank line starts.
    #[track_caller]
    pub fn lines(&self) -> Vec<&str> {
        self.ok().text("content").lines().take_while(|line| !line.is_empty()).collect()
    }

    /// Asserts what the model sees of a read, and takes the reply on.
    #[track_caller]
    pub fn expect_content(&self, content: &str) -> &Self {
        assert_eq!(self.ok().text("content"), content, "{}", self.describe());
        self
    }

    /// Asserts the results of a glob, in any order.
    #[track_caller]
    pub fn expect_paths(&self, paths: &[&str]) -> &Self {
        self.ok();
        let mut right = paths.to_vec();
        right.sort_unstable();
        let mut found = if self.number("count") == 0 { Vec::new() } else { self.lines() };
        found.sort_unstable();
        assert_eq!(found, right, "{}", self.describe());
        assert_eq!(self.number("count"), paths.len() as u64, "{}", self.describe());
        self
    }

    /// Asserts that a command ended by itself with this code and this standard output.
    #[track_caller]
    pub fn expect(&self, code: i64, stdout: &str) -> &Self {
        self.expect_code(code);
        assert_eq!(self.text("stdout"), stdout, "{}", self.describe());
        self
    }

    /// Asserts that a command ended by itself with this code.
    #[track_caller]
    pub fn expect_code(&self, code: i64) -> &Self {
        self.ok();
        let seen = (self.text("status"), self.json.get("exitCode").and_then(Value::as_i64));
        assert_eq!(seen, ("completed", Some(code)), "{}", self.describe());
        self
    }

    /// Asserts that its time limit ended a command, and that nobody can take that for success.
    #[track_caller]
    pub fn expect_timed_out(&self) -> &Self {
        assert_eq!(self.ok().text("status"), "timed_out", "{}", self.describe());
        assert_ne!(
            self.json.get("exitCode").and_then(Value::as_i64),
            Some(0),
            "{}",
            self.describe()
        );
        self
    }

    /// The whole answer, cut for a message.
    pub fn describe(&self) -> String {
        format!("error={} after {:?}: {}", self.is_error, self.took, cut(&self.json.to_string()))
    }
}

fn cut(text: &str) -> String {
    text.chars().take(3000).collect()
}

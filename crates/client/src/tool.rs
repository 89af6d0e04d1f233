//! Tools, as a model sees them.

use bytes::Bytes;
use cofferdam_spec::Enforcement;

/// A tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// What it does, for a model.
    pub description: String,
    /// JSON Schema of its input.
    pub input_schema_json: String,
    /// Whether it changes nothing in the workspace.
    pub read_only: bool,
}

/// A tool to call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CallToolRequest {
    /// Its name.
    pub name: String,
    /// Its input, a JSON object; the request may be 16 MiB.
    pub input_json: String,
    /// Whose call this is; what was read counts for this session.
    pub session: String,
    /// Unique in the workspace.
    pub request_id: String,
}

/// What a tool answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolReply {
    /// A JSON object; with `is_error`, `{"error": {"code", "message", "hint"}}`.
    pub output_json: String,
    /// Whether the tool refused or failed.
    pub is_error: bool,
    /// Whether this is the stored answer of an earlier call.
    pub replayed: bool,
    /// What the kernel enforced.
    pub enforcement: Enforcement,
    /// Position in the audit log; 0 without one.
    pub audit_sequence: u64,
    /// Hash of the audit record.
    pub audit_hash: Bytes,
}

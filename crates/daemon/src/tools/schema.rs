//! What a model is told of each tool, and the check of what it sends. Both come from one table, so
//! that they cannot say different things.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value, json};

use crate::tools::errors::{ToolError, excerpt};

/// Characters of a wrong value that an error repeats.
const RECEIVED_SHOWN_MAX: usize = 80;

/// A tool as a model knows it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Definition {
    /// Its name.
    pub(crate) name: &'static str,
    /// What it does, for the model.
    pub(crate) about: &'static str,
    /// Whether it changes nothing in the workspace.
    pub(crate) read_only: bool,
    /// The fields of its input, in the order in which a person reads them.
    pub(crate) fields: &'static [Field],
}

/// A field of a tool's input.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Field {
    /// Its name.
    pub(crate) name: &'static str,
    /// What it means: unit, bounds, default.
    pub(crate) about: &'static str,
    /// What it holds.
    pub(crate) kind: Kind,
    /// Whether it must be there.
    pub(crate) required: bool,
}

/// What a field holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Any string, also the empty one.
    Text,
    /// A string of at least one character.
    NonEmptyText,
    /// One of these strings.
    Choice(&'static [&'static str]),
    /// True or false.
    Flag,
    /// A whole number. Numbers above the range of 64 bits count as the largest one of it.
    Count {
        /// The least.
        min: u64,
        /// The largest; `None` for no bound.
        max: Option<u64>,
    },
    /// A number above 0.
    Seconds {
        /// The largest.
        max: u64,
    },
}

impl Kind {
    /// As in a JSON Schema, without the description.
    fn schema(self) -> Value {
        match self {
            Kind::Text => json!({ "type": "string" }),
            Kind::NonEmptyText => json!({ "type": "string", "minLength": 1 }),
            Kind::Choice(names) => json!({ "type": "string", "enum": names }),
            Kind::Flag => json!({ "type": "boolean" }),
            Kind::Count { min, max: None } => json!({ "type": "integer", "minimum": min }),
            Kind::Count { min, max: Some(max) } => {
                json!({ "type": "integer", "minimum": min, "maximum": max })
            }
            Kind::Seconds { max } => {
                json!({ "type": "number", "exclusiveMinimum": 0, "maximum": max })
            }
        }
    }

    /// In a few words, for a table and for hints.
    fn words(self) -> String {
        match self {
            Kind::Text => "string".to_owned(),
            Kind::NonEmptyText => "string, not empty".to_owned(),
            Kind::Choice(names) => {
                let quoted: Vec<String> = names.iter().map(|name| format!("\"{name}\"")).collect();
                quoted.join(" or ")
            }
            Kind::Flag => "boolean".to_owned(),
            Kind::Count { min, max: None } => format!("integer, at least {min}"),
            Kind::Count { min, max: Some(max) } => format!("integer, {min} to {max}"),
            Kind::Seconds { max } => format!("number above 0, at most {max}"),
        }
    }

    /// Checks a value, or says what it must be.
    fn take(self, value: Value) -> Result<Argument, Wrong> {
        let wrong =
            |rule: &str, value: &Value| Wrong { rule: rule.to_owned(), got: received(value) };
        match (self, value) {
            (Kind::Text, Value::String(text)) => Ok(Argument::Text(text)),
            (Kind::NonEmptyText, Value::String(text)) if !text.is_empty() => {
                Ok(Argument::Text(text))
            }
            (Kind::NonEmptyText, value @ Value::String(_)) => {
                Err(wrong("must not be empty", &value))
            }
            (Kind::Text | Kind::NonEmptyText, value) => Err(wrong("must be a string", &value)),
            (Kind::Choice(names), Value::String(text)) if names.contains(&text.as_str()) => {
                Ok(Argument::Text(text))
            }
            (Kind::Choice(_), value) => Err(wrong(&format!("must be {}", self.words()), &value)),
            (Kind::Flag, Value::Bool(flag)) => Ok(Argument::Flag(flag)),
            (Kind::Flag, value) => Err(wrong("must be true or false", &value)),
            (Kind::Count { min, max }, value) => match whole(&value) {
                Whole::No => Err(wrong("must be an integer", &value)),
                Whole::Negative => Err(wrong(&format!("must be >= {min}"), &value)),
                Whole::Number(number) if number < min => {
                    Err(wrong(&format!("must be >= {min}"), &value))
                }
                Whole::Number(number) => match max {
                    Some(max) if number > max => Err(wrong(&format!("must be <= {max}"), &value)),
                    _ => Ok(Argument::Count(number)),
                },
            },
            (Kind::Seconds { max }, value) => match value.as_f64() {
                None => Err(wrong("must be a number", &value)),
                Some(seconds) if seconds <= 0.0 => Err(wrong("must be > 0", &value)),
                Some(seconds) if seconds > max as f64 => {
                    Err(wrong(&format!("must be <= {max}"), &value))
                }
                Some(seconds) => Ok(Argument::Seconds(seconds)),
            },
        }
    }
}

/// A value as a whole number. As in JSON Schema, `2.0` and `1e3` are whole.
enum Whole {
    No,
    Negative,
    Number(u64),
}

fn whole(value: &Value) -> Whole {
    if let Some(number) = value.as_u64() {
        return Whole::Number(number);
    }
    match value.as_f64() {
        Some(number) if number.fract() != 0.0 => Whole::No,
        Some(number) if number < 0.0 => Whole::Negative,
        // The cast saturates.
        Some(number) => Whole::Number(number as u64),
        None => Whole::No,
    }
}

/// What is wrong with a value.
struct Wrong {
    rule: String,
    got: String,
}

/// A value for an error, in JSON and not too long.
fn received(value: &Value) -> String {
    match value {
        // Only what is shown is encoded: the text may be long.
        Value::String(text) if text.len() > RECEIVED_SHOWN_MAX => {
            format!("{}…", Value::from(excerpt(text, RECEIVED_SHOWN_MAX)))
        }
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        value => value.to_string(),
    }
}

/// A checked value.
#[derive(Debug, Clone, PartialEq)]
enum Argument {
    Text(String),
    Flag(bool),
    Count(u64),
    Seconds(f64),
}

/// The checked input of one call. Every value is taken at most once.
#[derive(Debug, PartialEq)]
pub(crate) struct Arguments {
    definition: &'static Definition,
    values: Vec<Option<Argument>>,
}

impl Arguments {
    /// A text; `None` when it was left out.
    pub(crate) fn text(&mut self, field: &str) -> Option<String> {
        match self.take(field)? {
            Argument::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A text that the definition requires.
    pub(crate) fn required_text(&mut self, field: &str) -> Result<String, ToolError> {
        self.text(field).ok_or_else(|| self.definition.refuse(&format!("{field} is missing.")))
    }

    /// A flag; false when it was left out.
    pub(crate) fn flag(&mut self, field: &str) -> bool {
        matches!(self.take(field), Some(Argument::Flag(true)))
    }

    /// A whole number; `None` when it was left out.
    pub(crate) fn count(&mut self, field: &str) -> Option<u64> {
        match self.take(field)? {
            Argument::Count(number) => Some(number),
            _ => None,
        }
    }

    /// A number of seconds; `None` when it was left out.
    pub(crate) fn seconds(&mut self, field: &str) -> Option<f64> {
        match self.take(field)? {
            Argument::Seconds(seconds) => Some(seconds),
            _ => None,
        }
    }

    fn take(&mut self, field: &str) -> Option<Argument> {
        self.values.get_mut(self.definition.position(field)?)?.take()
    }
}

impl Definition {
    /// JSON Schema of the input: a closed object.
    pub(crate) fn schema(&self) -> Value {
        let properties: Map<String, Value> = self
            .fields
            .iter()
            .map(|field| {
                let mut schema = field.kind.schema();
                schema["description"] = field.about.into();
                (field.name.to_owned(), schema)
            })
            .collect();
        let required: Vec<&str> =
            self.fields.iter().filter(|field| field.required).map(|field| field.name).collect();
        json!({
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": false,
        })
    }

    /// The fields as rows of a table in Markdown.
    pub(crate) fn markdown(&self) -> String {
        let rows = self.fields.iter().map(|field| {
            let required = if field.required { ", required" } else { "" };
            let (words, about) = (field.kind.words(), as_markdown(field.about));
            format!("| `{}` | {words}{required} | {about} |\n", field.name)
        });
        let mut text = "| field | type | meaning |\n|---|---|---|\n".to_owned();
        text.extend(rows);
        text
    }

    /// Checks an input. Everything that is wrong is told at once.
    pub(crate) fn check(&'static self, input_json: &str) -> Result<Arguments, ToolError> {
        let Entries(entries) = serde_json::from_str(input_json)
            .map_err(|error| self.refuse(&format!("the input is no JSON object: {error}.")))?;
        let mut values: Vec<Option<Argument>> = Vec::new();
        values.resize_with(self.fields.len(), || None);
        let mut given = vec![false; self.fields.len()];
        let mut problems = Vec::new();
        for (name, value) in entries {
            let Some(index) = self.position(&name) else {
                let name = excerpt(&name, RECEIVED_SHOWN_MAX);
                let known: Vec<&str> = self.fields.iter().map(|field| field.name).collect();
                let known = known.join(", ");
                problems
                    .push(format!("{name} is no field of this tool, whose fields are {known}."));
                continue;
            };
            if std::mem::replace(&mut given[index], true) {
                problems.push(format!("{name} is given twice."));
                continue;
            }
            match self.fields[index].kind.take(value) {
                Ok(argument) => values[index] = Some(argument),
                Err(Wrong { rule, got }) => {
                    problems.push(format!("{name} {rule}. Received: {got}."))
                }
            }
        }
        for (field, given) in self.fields.iter().zip(given) {
            if field.required && !given {
                problems.push(format!("{} is missing.", field.name));
            }
        }
        if problems.is_empty() {
            return Ok(Arguments { definition: self, values });
        }
        problems.truncate(PROBLEMS_SHOWN_MAX);
        Err(self.refuse(&problems.join(" ")))
    }

    /// The error for a wrong input.
    pub(crate) fn refuse(&self, reason: &str) -> ToolError {
        let fields: Vec<String> = self
            .fields
            .iter()
            .map(|field| {
                let required = if field.required { ", required" } else { "" };
                format!("{} ({}{required})", field.name, field.kind.words())
            })
            .collect();
        ToolError::invalid_input(
            self.name,
            reason,
            format!("Nothing was done. The fields are: {}.", fields.join("; ")),
        )
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.fields.iter().position(|field| field.name == name)
    }
}

/// A text without meaning for Markdown.
pub(crate) fn as_markdown(text: &str) -> String {
    let mut page = String::with_capacity(text.len());
    for character in text.chars() {
        if "\\`*_[]<>|".contains(character) {
            page.push('\\');
        }
        page.push(character);
    }
    page
}

/// Problems of one input that are told; an input with more of them is no mistake.
const PROBLEMS_SHOWN_MAX: usize = 20;

/// The entries of a JSON object, in order, also those whose name comes twice.
struct Entries(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Entries;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::with_capacity(4);
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tools::DEFINITIONS;

    static SAMPLE: Definition = Definition {
        name: "sample",
        about: "",
        read_only: true,
        fields: &[
            Field { name: "text", about: "", kind: Kind::Text, required: true },
            Field { name: "full", about: "", kind: Kind::NonEmptyText, required: false },
            Field { name: "pick", about: "", kind: Kind::Choice(&["a", "b"]), required: false },
            Field { name: "flag", about: "", kind: Kind::Flag, required: false },
            Field {
                name: "line",
                about: "",
                kind: Kind::Count { min: 1, max: None },
                required: false,
            },
            Field {
                name: "most",
                about: "",
                kind: Kind::Count { min: 1, max: Some(1000) },
                required: false,
            },
            Field { name: "time", about: "", kind: Kind::Seconds { max: 86_400 }, required: false },
        ],
    };

    fn message(input: &str) -> String {
        SAMPLE.check(input).unwrap_err().message
    }

    fn reason(input: &str) -> String {
        let prefix = "Invalid input for tool \"sample\": ";
        message(input).strip_prefix(prefix).unwrap_or_else(|| panic!("{input}")).to_owned()
    }

    #[test]
    fn values_are_taken_by_name() {
        let mut arguments = SAMPLE
            .check(r#"{"line": 1e9, "text": "x", "flag": true, "time": 0.5, "pick": "b"}"#)
            .unwrap();
        assert_eq!(arguments.required_text("text").unwrap(), "x");
        assert_eq!(arguments.text("pick").as_deref(), Some("b"));
        assert_eq!(arguments.text("full"), None);
        assert_eq!(arguments.count("line"), Some(1_000_000_000));
        assert_eq!(arguments.count("most"), None);
        assert_eq!(arguments.seconds("time"), Some(0.5));
        assert!(arguments.flag("flag"));
    }

    #[test]
    fn every_wrong_field_is_named_with_its_rule_and_its_value() {
        let table = [
            (r#"{}"#, "text is missing."),
            (r#"{"text": null}"#, "text must be a string. Received: null."),
            (r#"{"text": 5}"#, "text must be a string. Received: 5."),
            (r#"{"text": "", "full": ""}"#, "full must not be empty. Received: \"\"."),
            (r#"{"text": "", "pick": "c"}"#, "pick must be \"a\" or \"b\". Received: \"c\"."),
            (r#"{"text": "", "flag": "yes"}"#, "flag must be true or false. Received: \"yes\"."),
            (r#"{"text": "", "line": 0}"#, "line must be >= 1. Received: 0."),
            (r#"{"text": "", "line": -1}"#, "line must be >= 1. Received: -1."),
            (r#"{"text": "", "line": 1.5}"#, "line must be an integer. Received: 1.5."),
            (r#"{"text": "", "line": "2"}"#, "line must be an integer. Received: \"2\"."),
            (r#"{"text": "", "line": []}"#, "line must be an integer. Received: an array."),
            (r#"{"text": "", "most": 1001}"#, "most must be <= 1000. Received: 1001."),
            (r#"{"text": "", "time": 0}"#, "time must be > 0. Received: 0."),
            (r#"{"text": "", "time": 86401}"#, "time must be <= 86400. Received: 86401."),
            (r#"{"text": "", "time": "9"}"#, "time must be a number. Received: \"9\"."),
            (r#"{"text": "", "text": ""}"#, "text is given twice."),
            (
                r#"{"text": 1, "line": 0}"#,
                "text must be a string. Received: 1. line must be >= 1. Received: 0.",
            ),
        ];
        for (input, expected) in table {
            assert_eq!(reason(input), expected, "{input}");
        }
        let unknown = reason(r#"{"text": "", "cwd": "/"}"#);
        assert!(unknown.starts_with("cwd is no field of this tool, whose fields are text, full,"));
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for input in ["", "[]", "null", "\"x\"", "{", "{} {}"] {
            assert!(reason(input).starts_with("the input is no JSON object: "), "{input}");
        }
    }

    #[test]
    fn numbers_beyond_64_bits_are_the_largest() {
        let mut arguments = SAMPLE.check(r#"{"text": "", "line": 1e30}"#).unwrap();
        assert_eq!(arguments.count("line"), Some(u64::MAX));
    }

    #[test]
    fn long_and_many_wrong_values_make_no_long_error() {
        let long = "é".repeat(100_000);
        assert!(reason(&json!({ "text": "", "line": long }).to_string()).len() < 300);
        let many: Map<String, Value> = (0..10_000).map(|n| (n.to_string(), Value::Null)).collect();
        assert!(reason(&Value::Object(many).to_string()).len() < 10_000);
    }

    /// A JSON Schema validator of its own, for the words that schemas of tools use.
    fn allows(schema: &Value, value: &Value) -> bool {
        let keys: Vec<&str> = schema.as_object().unwrap().keys().map(String::as_str).collect();
        keys.iter().all(|key| {
            let rule = &schema[key];
            match *key {
                "description" => true,
                "type" => match rule.as_str().unwrap() {
                    "object" => value.is_object(),
                    "string" => value.is_string(),
                    "boolean" => value.is_boolean(),
                    "number" => value.is_number(),
                    "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
                    other => panic!("{other}"),
                },
                "minLength" => value
                    .as_str()
                    .is_none_or(|text| text.chars().count() as u64 >= rule.as_u64().unwrap()),
                "enum" => rule.as_array().unwrap().contains(value),
                "minimum" => value.as_f64().is_none_or(|number| number >= rule.as_f64().unwrap()),
                "maximum" => value.as_f64().is_none_or(|number| number <= rule.as_f64().unwrap()),
                "exclusiveMinimum" => {
                    value.as_f64().is_none_or(|number| number > rule.as_f64().unwrap())
                }
                "properties" => value.as_object().is_none_or(|object| {
                    object.iter().all(|(name, value)| {
                        rule.get(name).is_none_or(|schema| allows(schema, value))
                    })
                }),
                "required" => value.as_object().is_none_or(|object| {
                    let names = rule.as_array().unwrap();
                    names.iter().all(|name| object.contains_key(name.as_str().unwrap()))
                }),
                "additionalProperties" => {
                    assert_eq!(rule, &Value::Bool(false));
                    value.as_object().is_none_or(|object| {
                        object.keys().all(|name| schema["properties"].get(name).is_some())
                    })
                }
                other => panic!("the validator does not know {other}"),
            }
        })
    }

    fn any_value() -> impl Strategy<Value = Value> {
        prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            (-3_i64..2_003).prop_map(Value::from),
            (-4_i32..200_000).prop_map(|number| Value::from(f64::from(number) / 2.0)),
            "[ab]{0,2}|content|files|count".prop_map(Value::from),
            Just(json!([1])),
            Just(json!({})),
        ]
    }

    fn any_input(definition: &'static Definition) -> impl Strategy<Value = Value> {
        let mut names: Vec<&str> = definition.fields.iter().map(|field| field.name).collect();
        names.push("other");
        let entry = (proptest::sample::select(names), any_value());
        // Mostly right inputs, so that acceptance is compared too.
        let right = definition.fields.iter().map(|field| {
            let value = match field.kind {
                Kind::Text | Kind::NonEmptyText => json!("x"),
                Kind::Choice(names) => json!(names[0]),
                Kind::Flag => json!(true),
                Kind::Count { .. } | Kind::Seconds { .. } => json!(7),
            };
            (field.name.to_owned(), value)
        });
        let right: Map<String, Value> = right.collect();
        proptest::collection::vec(entry, 0..3).prop_map(move |changes| {
            let mut input = right.clone();
            for (name, value) in changes {
                input.insert(name.to_owned(), value);
            }
            Value::Object(input)
        })
    }

    proptest! {
        #[test]
        fn the_check_accepts_exactly_what_the_schema_allows(
            (index, input) in (0..=DEFINITIONS.len()).prop_flat_map(|index| {
                let definition = DEFINITIONS.get(index).copied().unwrap_or(&SAMPLE);
                (Just(index), any_input(definition))
            })
        ) {
            let definition = DEFINITIONS.get(index).copied().unwrap_or(&SAMPLE);
            let accepted = definition.check(&input.to_string()).is_ok();
            prop_assert_eq!(accepted, allows(&definition.schema(), &input));
        }
    }

    #[test]
    fn every_field_of_every_tool_is_explained() {
        for definition in DEFINITIONS.iter() {
            assert!(!definition.about.is_empty());
            for field in definition.fields {
                assert!(field.about.ends_with('.'), "{}.{}", definition.name, field.name);
                assert!(!field.about.contains('|'), "{}.{}", definition.name, field.name);
            }
        }
    }
}

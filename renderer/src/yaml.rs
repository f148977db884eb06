//! The only place where YAML is read or written.
//!
//! What we write, Kubernetes must read back as exactly what went in: strings that look like
//! numbers, booleans or nulls, as values and as keys. `tests/e2e/yaml.rs` proves it against
//! `kubectl kustomize` and Go's `sigs.k8s.io/yaml`.

use serde::de::{DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_saphyr::{LitStr, Spanned};
use std::fmt;

/// Text that is not the YAML that was expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct YamlError {
    /// 1-based line; 0 when it is not known.
    pub line: u64,
    /// What is wrong there.
    pub message: String,
}

/// Writes `value` as one YAML document with a final newline. Mappings of a [`Value`] are sorted by
/// key, so equal values give equal bytes.
///
/// # Errors
/// When `value` cannot be expressed, for example a mapping whose keys are mappings.
pub fn to_string<T: Serialize>(value: &T) -> Result<String, YamlError> {
    // Its defaults fold strings at 80 columns, which makes diffs jump, and write every text of
    // several lines as a block, which Go does not always read back; see `Written`.
    let options = serde_saphyr::ser_options! {
        folded_wrap_chars: usize::MAX,
        min_fold_chars: usize::MAX,
        prefer_block_scalars: false,
    };
    let mut text = serde_saphyr::to_string_with_options(&Written(&to_value(value)?), options)
        .map_err(|error| YamlError { line: 0, message: error.to_string() })?;
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Ok(text)
}

/// A value as we write it: text of several lines as a literal block where that is safe, because
/// people read and review it, and quoted otherwise.
struct Written<'a>(&'a Value);

impl Serialize for Written<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::String(text) if is_plain_block(text) => LitStr(text).serialize(serializer),
            Value::Array(items) => serializer.collect_seq(items.iter().map(Written)),
            Value::Object(map) => serializer.collect_map(map.iter().map(|(key, value)| (key, Written(value)))),
            other => other.serialize(serializer),
        }
    }
}

/// Whether `text` survives as a literal block in every reader: several lines of printable text,
/// the first of them not indented, no blanks at line ends, at most one final line break. go-yaml,
/// for one, refuses a block that begins with a tab.
fn is_plain_block(text: &str) -> bool {
    let body = text.strip_suffix('\n').unwrap_or(text);
    let printable = |c: char| matches!(c, '\t' | ' '..='~' | '\u{a1}'..='\u{2027}' | '\u{2030}'..='\u{d7ff}' | '\u{e000}'..='\u{fefe}' | '\u{ff00}'..='\u{fffd}');
    text.contains('\n')
        && !body.is_empty()
        && !body.starts_with([' ', '\t', '\n'])
        && !body.ends_with('\n')
        && body
            .split('\n')
            .all(|line| !line.ends_with([' ', '\t']) && !line.starts_with('\t') && line.chars().all(printable))
}

/// The first character of `text` that kustomize, and so Flux, cannot carry however it is written:
/// it breaks on its own output. One such file would block every other change of its shard.
#[must_use]
pub fn uncarriable(text: &str) -> Option<char> {
    text.chars().find(|c| matches!(c, '\u{7f}'..='\u{9f}' | '\u{fffe}' | '\u{ffff}'))
}

/// The one key that kustomize cannot carry: it writes it bare, and readers take it for a merge.
pub const MERGE_KEY: &str = "<<";

/// Reads one YAML document. Duplicate keys are errors; size, depth and aliases are bounded.
///
/// # Errors
/// With line and reason when the text is not YAML or not a `T`.
pub fn from_str<T: DeserializeOwned>(text: &str) -> Result<T, YamlError> {
    serde_saphyr::from_str_with_options(text, serde_saphyr::options! { with_snippet: false }).map_err(|error| {
        YamlError { line: error.location().map_or(0, |location| location.line()), message: plain(&error) }
    })
}

/// The message without the position, which [`YamlError`] carries as a field.
fn plain(error: &serde_saphyr::Error) -> String {
    let text = error.without_snippet().to_string();
    match text.rsplit_once(" at line ") {
        Some((message, _)) => message.to_owned(),
        None => text.strip_prefix("error: ").unwrap_or(&text).to_owned(),
    }
}

/// One step of a path into a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Segment {
    /// A key of a mapping.
    Key(String),
    /// An element of a list, 0-based.
    Index(usize),
}

/// A path as people write it: `spec.parameters[2].default`.
#[must_use]
pub fn display_path(path: &[Segment]) -> String {
    let mut text = String::new();
    for segment in path {
        match segment {
            Segment::Key(key) if text.is_empty() => text.push_str(key),
            Segment::Key(key) => {
                text.push('.');
                text.push_str(key);
            }
            Segment::Index(index) => text.push_str(&format!("[{index}]")),
        }
    }
    text
}

/// Where each field of a document stands, to give a problem its line.
#[derive(Debug)]
pub struct Lines(Tree);

impl Lines {
    /// Reads the positions of `text`.
    ///
    /// # Errors
    /// When the text is not YAML.
    pub fn of(text: &str) -> Result<Self, YamlError> {
        from_str::<Spanned<Node>>(text).map(|spanned| Self(Tree::from(spanned)))
    }

    /// The 1-based line of the field at `path`, or of its nearest ancestor that exists.
    #[must_use]
    pub fn line(&self, path: &[Segment]) -> u64 {
        let mut tree = &self.0;
        let mut line = tree.line;
        for segment in path {
            let next = match (&tree.node, segment) {
                (Node::Map(entries), Segment::Key(key)) => {
                    entries.iter().find(|(name, ..)| name == key).map(|(_, key_line, child)| (*key_line, child))
                }
                (Node::List(items), Segment::Index(index)) => items.get(*index).map(|child| (child.line, child)),
                _ => None,
            };
            let Some((next_line, child)) = next else { break };
            (line, tree) = (next_line, child);
        }
        line
    }
}

#[derive(Debug)]
struct Tree {
    line: u64,
    node: Node,
}

impl From<Spanned<Node>> for Tree {
    fn from(spanned: Spanned<Node>) -> Self {
        Self { line: spanned.referenced.line(), node: spanned.value }
    }
}

#[derive(Debug)]
enum Node {
    Map(Vec<(String, u64, Tree)>),
    List(Vec<Tree>),
    Scalar,
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NodeVisitor;
        impl<'de> Visitor<'de> for NodeVisitor {
            type Value = Node;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a YAML node")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
                let mut entries = Vec::new();
                while let Some((key, value)) = map.next_entry::<Spanned<String>, Spanned<Node>>()? {
                    let line = key.referenced.line();
                    entries.push((key.value, line, Tree::from(value)));
                }
                Ok(Node::Map(entries))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Node, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = seq.next_element::<Spanned<Node>>()? {
                    items.push(Tree::from(item));
                }
                Ok(Node::List(items))
            }
            fn visit_bool<E>(self, _: bool) -> Result<Node, E> {
                Ok(Node::Scalar)
            }
            fn visit_i64<E>(self, _: i64) -> Result<Node, E> {
                Ok(Node::Scalar)
            }
            fn visit_u64<E>(self, _: u64) -> Result<Node, E> {
                Ok(Node::Scalar)
            }
            fn visit_f64<E>(self, _: f64) -> Result<Node, E> {
                Ok(Node::Scalar)
            }
            fn visit_str<E>(self, _: &str) -> Result<Node, E> {
                Ok(Node::Scalar)
            }
            fn visit_unit<E>(self) -> Result<Node, E> {
                Ok(Node::Scalar)
            }
            fn visit_none<E>(self) -> Result<Node, E> {
                Ok(Node::Scalar)
            }
            fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<Node, D::Error> {
                Node::deserialize(inner)
            }
        }
        deserializer.deserialize_any(NodeVisitor)
    }
}

/// Any serialisable value as a [`Value`], whose mappings are sorted.
///
/// # Errors
/// As [`to_string`].
pub fn to_value<T: Serialize>(value: &T) -> Result<Value, YamlError> {
    serde_json::to_value(value).map_err(|error| YamlError { line: 0, message: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_looks_like_another_type_stays_a_string() {
        for text in [
            "706798e8",
            "0999991",
            "1.20",
            "y",
            "n",
            "yes",
            "no",
            "on",
            "off",
            "NO",
            "~",
            "null",
            "=",
            "<<",
            "1_000",
            "0x1F",
            "0o17",
            ".inf",
            "1:30",
            "2026-11-29",
            "",
            " a",
            "a ",
            "#",
            "- a",
            "a: b",
            "a\nb",
            "a\n\n",
            "\n",
            "\t",
            "\u{85}",
            "\u{feff}x",
            "é",
            "\u{1F600}",
        ] {
            let value = json!({ text: text, "list": [text] });
            let written = to_string(&value).unwrap();
            assert_eq!(from_str::<Value>(&written).unwrap(), value, "{written}");
        }
    }

    #[test]
    fn a_long_string_is_not_folded() {
        let value = json!({ "a": "word ".repeat(100) + "end" });
        assert_eq!(to_string(&value).unwrap().lines().count(), 1);
    }

    #[test]
    fn lines_are_found_by_path() {
        let lines = Lines::of("a: 1\nb:\n  - c: 2\n  - d: 3\n    e: 4\n").unwrap();
        let path = [Segment::Key("b".into()), Segment::Index(1), Segment::Key("e".into())];
        assert_eq!(lines.line(&path), 5);
        assert_eq!(lines.line(&path[..2]), 4);
        assert_eq!(display_path(&path), "b[1].e");
        assert_eq!(lines.line(&[Segment::Key("missing".into())]), 1);
    }

    #[test]
    fn duplicate_keys_and_wrong_types_name_their_line() {
        assert_eq!(from_str::<Value>("a: 1\nb: 2\na: 3\n").unwrap_err().line, 3);
        #[derive(Debug, serde::Deserialize)]
        struct Port {
            #[expect(dead_code, reason = "only its type matters")]
            port: u16,
        }
        assert_eq!(from_str::<Port>("port: abc\n").unwrap_err().line, 1);
    }
}

//! The language of `values.styrmin.yml`: a YAML tree with expressions.
//!
//! A string that is one `${{ expression }}` becomes the expression's value with its type; a string
//! with expressions inside other text becomes a string; `$if` decides whether a key or an element
//! is there at all. Text is never templated, so a value cannot break the YAML around it.

use crate::yaml::{Segment, display_path};
use minijinja::value::Serde;
use minijinja::{Environment, UndefinedBehavior};
use serde_json::{Map, Value};

/// Work that one expression may do, in minijinja's instructions.
const FUEL: u64 = 50_000;
/// Longest text that expressions may produce in one string.
const TEXT_MAX: usize = 1 << 20;
/// Key that decides whether its mapping is there.
const IF: &str = "$if";
/// Key that replaces its mapping.
const VALUE: &str = "$value";

/// An expression that cannot be used, and where it stands.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", display_path(path))]
pub struct ValuesError {
    /// Position in the values tree.
    pub path: Vec<Segment>,
    /// What is wrong. Never a value of the context: it may be a secret.
    pub message: String,
}

/// Evaluates the tree over `context`. A tree that is absent as a whole (`$if` at the top) gives
/// an empty mapping.
///
/// # Errors
/// The first expression that fails, with its place.
pub fn render(tree: &Value, context: &Value) -> Result<Value, ValuesError> {
    let engine = engine();
    let context = minijinja::Value::from(Serde(context));
    let mut path = Vec::new();
    let value = walk(&engine, &context, tree, &mut path)?;
    Ok(value.unwrap_or_else(|| Value::Object(Map::new())))
}

/// A use of the context by an expression: its place and the path it reads (`parameters.image`).
pub type Use = (Vec<Segment>, String);

/// Checks the tree without a context and lists what it reads.
///
/// # Errors
/// Every expression that is not one and every unknown `$` key, with its place.
pub fn check(tree: &Value) -> Result<Vec<Use>, Vec<ValuesError>> {
    let engine = engine();
    let mut inspection = Inspection { engine: &engine, path: Vec::new(), uses: Vec::new(), errors: Vec::new() };
    inspection.tree(tree);
    if inspection.errors.is_empty() { Ok(inspection.uses) } else { Err(inspection.errors) }
}

fn engine() -> Environment<'static> {
    let mut engine = Environment::new();
    engine.set_undefined_behavior(UndefinedBehavior::Strict);
    engine.set_fuel(Some(FUEL));
    engine.add_function("env_list", env_list);
    engine
}

/// `{A: "1"}` → `[{name: A, value: "1"}]`, sorted by name; a null value leaves the variable out.
fn env_list(map: &minijinja::Value) -> Result<minijinja::Value, minijinja::Error> {
    let mut entries = Vec::new();
    for key in map.try_iter()? {
        let value = map.get_item(&key)?;
        if !value.is_none() {
            entries.push((key.to_string(), value.to_string()));
        }
    }
    entries.sort();
    let list: Vec<Value> =
        entries.into_iter().map(|(name, value)| serde_json::json!({ "name": name, "value": value })).collect();
    Ok(minijinja::Value::from(Serde(list)))
}

/// Text split at its expressions.
enum Piece<'a> {
    Text(&'a str),
    Expression(&'a str),
}

fn pieces<'a>(engine: &Environment<'_>, text: &'a str) -> Result<Vec<Piece<'a>>, String> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while let Some(start) = rest.find("${{") {
        if start > 0 {
            pieces.push(Piece::Text(&rest[..start]));
        }
        let body = &rest[start + 3..];
        let mut first_error = None;
        let mut found = None;
        // "}}" may also stand inside the expression, as the end of nested mappings.
        for (end, _) in body.match_indices("}}").take(8) {
            match engine.compile_expression(body[..end].trim()) {
                Ok(_) => {
                    found = Some(end);
                    break;
                }
                Err(error) => {
                    first_error.get_or_insert_with(|| reason(&error));
                }
            }
        }
        let Some(end) = found else {
            return Err(first_error.unwrap_or_else(|| "\"${{\" has no closing \"}}\"".to_owned()));
        };
        pieces.push(Piece::Expression(body[..end].trim()));
        rest = &body[end + 2..];
    }
    if !rest.is_empty() || pieces.is_empty() {
        pieces.push(Piece::Text(rest));
    }
    Ok(pieces)
}

/// minijinja's message without anything that could be a value of the context.
fn reason(error: &minijinja::Error) -> String {
    match error.kind() {
        minijinja::ErrorKind::UndefinedError => "reads something that does not exist".to_owned(),
        minijinja::ErrorKind::OutOfFuel => "does too much work".to_owned(),
        minijinja::ErrorKind::SyntaxError => {
            format!("syntax error: {}", error.detail().unwrap_or("not an expression"))
        }
        kind => kind.to_string(),
    }
}

fn evaluate(
    engine: &Environment<'_>,
    context: &minijinja::Value,
    expression: &str,
) -> Result<minijinja::Value, String> {
    let failed = |error: &minijinja::Error| format!("`{expression}` {}", reason(error));
    let value = engine
        .compile_expression(expression)
        .and_then(|compiled| compiled.eval(context.clone()))
        .map_err(|error| failed(&error))?;
    if value.is_undefined() {
        return Err(format!("`{expression}` reads something that does not exist"));
    }
    Ok(value)
}

fn walk(
    engine: &Environment<'_>,
    context: &minijinja::Value,
    tree: &Value,
    path: &mut Vec<Segment>,
) -> Result<Option<Value>, ValuesError> {
    let fail = |path: &[Segment], message: String| ValuesError { path: path.to_vec(), message };
    match tree {
        Value::String(text) if text.contains("${{") => {
            let parts = pieces(engine, text).map_err(|message| fail(path, message))?;
            if let [Piece::Expression(expression)] = parts[..] {
                let value = evaluate(engine, context, expression).map_err(|message| fail(path, message))?;
                return serde_json::to_value(&value)
                    .map(Some)
                    .map_err(|_| fail(path, format!("`{expression}` is not a plain value")));
            }
            let mut out = String::new();
            for part in parts {
                match part {
                    Piece::Text(text) => out.push_str(text),
                    Piece::Expression(expression) => out.push_str(
                        &evaluate(engine, context, expression).map_err(|message| fail(path, message))?.to_string(),
                    ),
                }
                if out.len() > TEXT_MAX {
                    return Err(fail(path, "becomes longer than 1 MiB".to_owned()));
                }
            }
            Ok(Some(Value::String(out)))
        }
        Value::Array(items) => {
            let mut list = Vec::with_capacity(items.len());
            for (index, item) in items.iter().enumerate() {
                path.push(Segment::Index(index));
                list.extend(walk(engine, context, item, path)?);
                path.pop();
            }
            Ok(Some(Value::Array(list)))
        }
        Value::Object(map) => {
            if let Some(condition) = map.get(IF) {
                let holds = match condition {
                    Value::String(expression) => evaluate(engine, context, expression)
                        .map_err(|message| fail(path, format!("$if: {message}")))?
                        .is_true(),
                    other => other.as_bool().unwrap_or_default(),
                };
                if !holds {
                    return Ok(None);
                }
            }
            if let Some(value) = map.get(VALUE) {
                path.push(Segment::Key(VALUE.to_owned()));
                let result = walk(engine, context, value, path);
                path.pop();
                return result;
            }
            let mut object = Map::new();
            for (key, child) in map.iter().filter(|(key, _)| *key != IF) {
                path.push(Segment::Key(key.clone()));
                if let Some(value) = walk(engine, context, child, path)? {
                    object.insert(key.clone(), value);
                }
                path.pop();
            }
            Ok(Some(Value::Object(object)))
        }
        other => Ok(Some(other.clone())),
    }
}

/// What [`check`] finds on its way through the tree.
struct Inspection<'a> {
    engine: &'a Environment<'static>,
    path: Vec<Segment>,
    uses: Vec<Use>,
    errors: Vec<ValuesError>,
}

impl Inspection<'_> {
    fn error(&mut self, message: impl Into<String>) {
        self.errors.push(ValuesError { path: self.path.clone(), message: message.into() });
    }

    fn expression(&mut self, text: &str) {
        match self.engine.compile_expression(text) {
            Ok(compiled) => {
                let read = compiled.undeclared_variables(true);
                let known = read.into_iter().filter(|name| name != "env_list" && name != "range");
                self.uses.extend(known.map(|name| (self.path.clone(), name)));
            }
            Err(error) => self.error(format!("`{text}` {}", reason(&error))),
        }
    }

    fn below(&mut self, segment: Segment, tree: &Value) {
        self.path.push(segment);
        self.tree(tree);
        self.path.pop();
    }

    fn tree(&mut self, tree: &Value) {
        match tree {
            Value::String(text) if text.contains("${{") => match pieces(self.engine, text) {
                Ok(parts) => {
                    for part in parts {
                        if let Piece::Expression(text) = part {
                            self.expression(text);
                        }
                    }
                }
                Err(message) => self.error(message),
            },
            Value::Array(items) => {
                for (index, item) in items.iter().enumerate() {
                    self.below(Segment::Index(index), item);
                }
            }
            Value::Object(map) => {
                for (key, child) in map {
                    match key.strip_prefix('$') {
                        None => self.below(Segment::Key(key.clone()), child),
                        Some(_) => self.keyword(map, key, child),
                    }
                }
            }
            _ => {}
        }
    }

    fn keyword(&mut self, map: &Map<String, Value>, key: &str, child: &Value) {
        self.path.push(Segment::Key(key.to_owned()));
        match (key, child) {
            (IF, Value::String(text)) => self.expression(text),
            (IF, Value::Bool(_)) => {}
            (IF, _) => self.error("must be an expression, without ${{ }}"),
            (VALUE, child) => {
                if map.keys().any(|key| key != IF && key != VALUE) {
                    self.error("stands beside other keys; only $if may");
                }
                self.tree(child);
            }
            _ => self.error("is not known; only $if and $value begin with $"),
        }
        self.path.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn context() -> Value {
        json!({
            "parameters": {"image": "nginx", "n": 3, "ratio": 0.5, "flag": true, "none": null, "list": [1, "a"], "quote": "a: \"b\"\n- c"},
            "components": {"web": {"env_vars": {"B": "2", "A": "1", "C": null}}},
        })
    }

    #[test]
    fn types_are_kept_and_text_is_never_templated() {
        let tree = json!({
            "n": "${{ parameters.n }}",
            "ratio": "${{ parameters.ratio }}",
            "flag": "${{ parameters.flag }}",
            "none": "${{ parameters.none }}",
            "list": "${{ parameters.list }}",
            "text": "${{ parameters.image }}:${{ parameters.n }}",
            "quote": "${{ parameters.quote }}",
            "plain": "$x {{ y }}",
            "map": "${{ {'a': {'b': 1}} }}",
            "env": "${{ env_list(components.web.env_vars) }}",
        });
        assert_eq!(
            render(&tree, &context()).unwrap(),
            json!({
                "n": 3, "ratio": 0.5, "flag": true, "none": null, "list": [1, "a"], "text": "nginx:3",
                "quote": "a: \"b\"\n- c", "plain": "$x {{ y }}", "map": {"a": {"b": 1}},
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
            })
        );
    }

    #[test]
    fn a_condition_decides_whether_a_key_is_there() {
        let tree = json!({
            "gone": {"$if": "parameters.none is not none", "a": 1},
            "here": {"$if": "parameters.flag", "a": "${{ parameters.n }}"},
            "value": {"$if": "parameters.n > 2", "$value": [1]},
            "list": [{"$if": "false", "$value": 1}, {"$if": "true", "$value": 2}],
        });
        assert_eq!(render(&tree, &context()).unwrap(), json!({"here": {"a": 3}, "value": [1], "list": [2]}));
    }

    #[test]
    fn errors_name_the_place_and_no_value() {
        let tree = json!({"a": [{"b": "x ${{ parameters.image.nope }}"}]});
        assert_eq!(
            render(&tree, &context()).unwrap_err().to_string(),
            "a[0].b: `parameters.image.nope` reads something that does not exist"
        );
        let endless = json!({"a": "${{ range(100000) | list | length }}"});
        assert!(render(&endless, &context()).is_err());
        let broken = json!({"a": "${{ 1 + }}", "b": {"$iff": 1}, "c": "${{ x"});
        assert_eq!(check(&broken).unwrap_err().len(), 3);
    }

    #[test]
    fn check_lists_what_is_read() {
        let tree = json!({"a": "${{ parameters.image }}", "b": {"$if": "services.web.primary_fqdn", "c": 1}});
        let mut uses: Vec<String> = check(&tree).unwrap().into_iter().map(|(_, name)| name).collect();
        uses.sort();
        assert_eq!(uses, ["parameters.image", "services.web.primary_fqdn"]);
    }
}

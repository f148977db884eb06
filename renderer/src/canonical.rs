//! Canonical JSON and digests: the same content gives the same digest on both sides of the
//! Kubernetes API server.

use serde_json::{Number, Value};
use sha2::{Digest, Sha256};

/// Compact JSON with sorted keys and numbers written as the API server writes them after decoding
/// into `int64` or `float64` (so `1.0` is `1` and `1e21` is `1e+21`).
#[must_use]
pub fn to_string(value: &Value) -> String {
    let mut out = String::new();
    write(value, &mut out);
    out
}

/// `sha256:` and 64 hexadecimal digits over [`to_string`].
#[must_use]
pub fn digest(value: &Value) -> String {
    digest_bytes(to_string(value).as_bytes())
}

/// `sha256:` and 64 hexadecimal digits over `bytes`.
#[must_use]
pub fn digest_bytes(bytes: &[u8]) -> String {
    format!("sha256:{}", hex(&Sha256::digest(bytes)))
}

/// Lower-case hexadecimal.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The 12 digits of a digest that names carry: enough to tell versions of one driver apart.
#[must_use]
pub fn short(digest: &str) -> &str {
    let digits = digest.strip_prefix("sha256:").unwrap_or(digest);
    digits.get(..12).unwrap_or(digits)
}

fn write(value: &Value, out: &mut String) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(flag) => out.push_str(if *flag { "true" } else { "false" }),
        Value::Number(number) => out.push_str(&write_number(number)),
        Value::String(text) => write_string(text, out),
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write(item, out);
            }
            out.push(']');
        }
        Value::Object(map) => {
            // Sorted here too: a dependency that turns on serde_json's preserve_order must not
            // change digests.
            let mut keys: Vec<&String> = map.keys().collect();
            keys.sort_unstable();
            out.push('{');
            for (index, key) in keys.into_iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write_string(key, out);
                out.push(':');
                write(&map[key], out);
            }
            out.push('}');
        }
    }
}

fn write_string(text: &str, out: &mut String) {
    out.push_str(&Value::from(text).to_string());
}

/// As Go's encoding/json writes an `int64` or a `float64`.
fn write_number(number: &Number) -> String {
    if let Some(integer) = number.as_i64() {
        return integer.to_string();
    }
    let float = number.as_f64().unwrap_or_default();
    let size = float.abs();
    if size != 0.0 && !(1e-6..1e21).contains(&size) {
        let text = format!("{float:e}");
        return match text.split_once('e') {
            Some((digits, exponent)) if !exponent.starts_with('-') => {
                format!("{digits}e+{exponent}")
            }
            _ => text,
        };
    }
    float.to_string()
}

/// Digest of several texts, none of which runs into the next: half a SHA-256, hexadecimal. For what travels often.
#[must_use]
pub fn digest_parts(parts: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        let part = part.as_ref().as_bytes();
        hash.update(part.len().to_le_bytes());
        hash.update(part);
    }
    let mut text = hex(&hash.finalize());
    text.truncate(32);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_are_written_as_the_api_server_writes_them() {
        let cases = [
            ("1.0", "1"),
            ("1e2", "100"),
            ("0.1", "0.1"),
            ("1e21", "1e+21"),
            ("1.5e-7", "1.5e-7"),
            ("0.000001", "0.000001"),
            ("-3", "-3"),
            ("9223372036854775807", "9223372036854775807"),
            ("18446744073709551615", "18446744073709552000"),
            ("123456789012345680000", "123456789012345680000"),
        ];
        for (input, expected) in cases {
            let value: Value = serde_json::from_str(input).unwrap();
            assert_eq!(to_string(&value), expected, "{input}");
        }
    }

    #[test]
    fn keys_are_sorted_and_strings_escaped() {
        assert_eq!(to_string(&json!({"b": [null, true], "a": "x\"\n"})), r#"{"a":"x\"\n","b":[null,true]}"#);
    }
}

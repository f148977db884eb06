//! Newtypes and rules for every name that reaches Kubernetes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Longest DNS label, label value and hostname label.
pub const LABEL_MAX: usize = 63;
/// Length of an id.
pub const ID_LENGTH: usize = 12;

/// Checks an RFC 1123 label of at most `max` characters.
///
/// # Errors
/// What is wrong and what would be right, without naming the field.
pub fn dns_label(text: &str, max: usize) -> Result<(), String> {
    if text.len() > max {
        return Err(format!(
            "\"{text}\" has {} characters, at most {max} are possible; choose a shorter one",
            text.chars().count()
        ));
    }
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    if text.chars().all(inner) && edge(text.chars().next()) && edge(text.chars().last()) {
        return Ok(());
    }
    Err(format!(
        "\"{text}\" must consist of lower-case letters, digits and '-', and begin and end with a letter or digit"
    ))
}

/// Checks a DNS name such as `apps.example.com`.
///
/// # Errors
/// As [`dns_label`].
pub fn dns_name(text: &str) -> Result<(), String> {
    if text.len() > 253 {
        return Err(format!("\"{text}\" is longer than 253 characters"));
    }
    text.split('.').try_for_each(|label| {
        dns_label(label, LABEL_MAX).map_err(|error| format!("\"{text}\" is not a DNS name: {error}"))
    })
}

/// Checks a Kubernetes label value.
///
/// # Errors
/// As [`dns_label`].
pub fn label_value(text: &str) -> Result<(), String> {
    if text.len() > LABEL_MAX {
        return Err(format!("\"{text}\" is longer than the {LABEL_MAX} characters of a label value"));
    }
    let alphanumeric = |c: Option<char>| c.is_none_or(|c| c.is_ascii_alphanumeric());
    let inner = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if text.chars().all(inner) && alphanumeric(text.chars().next()) && alphanumeric(text.chars().last()) {
        return Ok(());
    }
    Err(format!("\"{text}\" is not a label value (letters, digits, '-', '_', '.', a letter or digit at both ends)"))
}

/// Checks the name of an environment variable, as Kubernetes accepts it.
///
/// # Errors
/// As [`dns_label`].
pub fn env_var(text: &str) -> Result<(), String> {
    let inner = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if !text.is_empty() && text.chars().all(inner) && !text.starts_with(|c: char| c.is_ascii_digit()) {
        return Ok(());
    }
    Err(format!(
        "\"{text}\" is not the name of an environment variable (letters, digits, '_', '-', '.', not a digit first)"
    ))
}

macro_rules! id {
    ($name:ident, $what:literal) => {
        #[doc = concat!("The id of ", $what, ": 12 characters, DNS-safe, beginning with a letter.")]
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The id as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = String;
            fn try_from(text: String) -> Result<Self, String> {
                let valid = text.len() == ID_LENGTH
                    && text.starts_with(|c: char| c.is_ascii_lowercase())
                    && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
                if valid {
                    return Ok(Self(text));
                }
                Err(format!(
                    concat!("\"{}\" is not the id of ", $what, " (12 lower-case letters and digits, a letter first)"),
                    text
                ))
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;
            fn from_str(text: &str) -> Result<Self, String> {
                Self::try_from(text.to_owned())
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

id!(ClusterId, "a cluster");
id!(EnvironmentId, "an environment");
id!(DeploymentId, "a deployment");

impl DeploymentId {
    /// Name of the StyrminDeployment, the HelmRelease, the Helm release and the application's
    /// namespace.
    #[must_use]
    pub fn object_name(&self) -> String {
        format!("styrmin-{self}")
    }

    /// Name of the Secret that holds the deployment's secret values, as committed.
    #[must_use]
    pub fn secret_name(&self) -> String {
        format!("styrmin-{self}-secrets")
    }
}

impl EnvironmentId {
    /// The lasting namespace that holds the environment's StyrminDeployments and HelmReleases.
    #[must_use]
    pub fn namespace(&self) -> String {
        format!("styrmin-env-{self}")
    }
}

/// Turns 12 random bytes into an id; a letter comes first.
#[must_use]
pub fn id_from_random(bytes: [u8; ID_LENGTH]) -> String {
    const ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    bytes
        .iter()
        .enumerate()
        .map(|(index, byte)| {
            let size = if index == 0 { 26 } else { ALPHABET.len() };
            char::from(ALPHABET[usize::from(*byte) % size])
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_dns_safe_and_begin_with_a_letter() {
        for byte in 0..=255 {
            let id = id_from_random([byte; ID_LENGTH]);
            assert!(id.parse::<DeploymentId>().is_ok(), "{id}");
        }
        for wrong in ["", "1bcdefghijkl", "Abcdefghijkl", "abcdefghijk", "abcdefghijklm", "abcdefghijk-"] {
            assert!(wrong.parse::<DeploymentId>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn names_that_kubernetes_refuses_are_refused() {
        assert!(dns_label("shop", 63).is_ok());
        for wrong in ["", "-a", "a-", "A", "a.b", "a_b", "é"] {
            assert!(dns_label(wrong, 63).is_err(), "{wrong}");
        }
        assert!(dns_label(&"a".repeat(64), 63).is_err());
        assert!(dns_name("apps.example.com").is_ok());
        assert!(dns_name("apps..com").is_err());
        assert!(label_value("").is_ok() && label_value("A.b_c").is_ok() && label_value("-a").is_err());
        assert!(env_var("A_B").is_ok() && env_var("1A").is_err() && env_var("A B").is_err());
    }
}

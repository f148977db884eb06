//! Who calls: tokens, and nothing without one.
//!
//! A token is 32 random bytes behind a prefix that says what it is; the database has its SHA-256.
//! An administrator's token carries the name and email of a person, who becomes the author of
//! commits. An agent's token speaks for its own cluster only.

use crate::clock::Clock;
use crate::secrets::write_private;
use crate::store::{Cluster, Millis, Person, Store, StoreError, Token, TokenKind};
use anyhow::Context as _;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use sha2::{Digest as _, Sha256};
use std::path::Path;
use styrmin_renderer::canonical::hex;
use tracing::info;

/// What an administrator's token begins with.
const PREFIX_ADMINISTRATOR: &str = "styrmin_admin_";
/// Longest header that is looked at.
const HEADER_MAX: usize = 1024;

/// Who calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Caller {
    /// A person who may do everything.
    Administrator(Person),
    /// The agent of this cluster.
    Agent {
        /// Id of the cluster.
        cluster: String,
    },
}

/// Why a caller is not let in.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    /// No token.
    #[error("no token: send the header \"Authorization: Bearer TOKEN\"")]
    Missing,
    /// Not one of ours.
    #[error("the token is not known or was revoked; ask an administrator for another")]
    Unknown,
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A new token: its text, shown once, and the hash that is stored.
#[must_use]
pub fn new_token(kind: TokenKind) -> (String, String) {
    let secret: [u8; 32] = rand::random();
    let prefix = match kind {
        TokenKind::Administrator => PREFIX_ADMINISTRATOR,
        TokenKind::Agent => "styrmin_agent_",
    };
    let text = format!("{prefix}{}", URL_SAFE_NO_PAD.encode(secret));
    let hash = hash(&text);
    (text, hash)
}

fn hash(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}

/// The token in a request: a bearer's, or the password of basic auth (what Git sends).
fn presented(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok().filter(|value| value.len() <= HEADER_MAX)?;
    let (scheme, rest) = value.split_once(' ')?;
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(rest.trim().to_owned());
    }
    if scheme.eq_ignore_ascii_case("basic") {
        let pair = String::from_utf8(STANDARD.decode(rest.trim()).ok()?).ok()?;
        return pair.split_once(':').map(|(_, password)| password.to_owned());
    }
    None
}

/// Finds out who calls.
///
/// # Errors
/// When there is no token, an unknown one, or the database fails.
pub async fn authenticate(store: &dyn Store, headers: &HeaderMap) -> Result<Caller, AuthError> {
    let text = presented(headers).filter(|text| !text.is_empty()).ok_or(AuthError::Missing)?;
    let token = store.token(&hash(&text)).await?.ok_or(AuthError::Unknown)?;
    match (token.kind, token.cluster_id) {
        (TokenKind::Administrator, _) => Ok(Caller::Administrator(Person { name: token.name, email: token.email })),
        (TokenKind::Agent, Some(cluster)) => Ok(Caller::Agent { cluster }),
        (TokenKind::Agent, None) => Err(AuthError::Unknown),
    }
}

/// Checks a name and email that will stand in commits.
///
/// # Errors
/// What is wrong: field and message.
pub fn check_person(name: &str, email: &str) -> Result<(), (&'static str, String)> {
    let bad = |text: &str| text.chars().any(|c| c.is_control() || "<>".contains(c)) || text.len() > 200;
    if name.trim().is_empty() || bad(name) {
        return Err((
            "name",
            format!("\"{}\" must be a person's name without '<', '>' and line breaks", name.escape_debug()),
        ));
    }
    // Git trims quotes and punctuation at the ends, and refuses what is left when that is nothing.
    if git2::Signature::new(name, "a@b", &git2::Time::new(0, 0)).is_err() {
        return Err(("name", format!("\"{}\" is no name for Git; use letters", name.escape_debug())));
    }
    if bad(email) || !email.contains('@') || email.contains(' ') {
        return Err(("email", format!("\"{}\" is not an email address", email.escape_debug())));
    }
    Ok(())
}

/// Adds an administrator's token; gives its text, which is shown this once.
///
/// # Errors
/// When the database fails.
pub async fn create_administrator(store: &dyn Store, clock: &dyn Clock, person: &Person) -> Result<String, StoreError> {
    let (text, hash) = new_token(TokenKind::Administrator);
    store.insert_token(&administrator(clock, person, hash)).await?;
    Ok(text)
}

/// A token of a cluster's agent, and its text.
#[must_use]
pub fn agent_token(cluster: &str, name: &str, now: Millis) -> (String, Token) {
    let (text, hash) = new_token(TokenKind::Agent);
    let token = Token {
        id: uuid::Uuid::now_v7().to_string(),
        hash,
        kind: TokenKind::Agent,
        name: format!("agent of {name}"),
        email: String::new(),
        cluster_id: Some(cluster.to_owned()),
        created_at: now,
        revoked_at: None,
    };
    (text, token)
}

/// Gives a cluster's agent another token, shown this once, in place of all that it had.
///
/// # Errors
/// When the database fails.
pub async fn replace_agent_token(
    store: &dyn Store,
    clock: &dyn Clock,
    cluster: &Cluster,
) -> Result<String, StoreError> {
    let (text, token) = agent_token(&cluster.id, &cluster.name, clock.now());
    store.replace_agent_token(&token).await?;
    Ok(text)
}

fn administrator(clock: &dyn Clock, person: &Person, hash: String) -> Token {
    Token {
        id: uuid::Uuid::now_v7().to_string(),
        hash,
        kind: TokenKind::Administrator,
        name: person.name.clone(),
        email: person.email.clone(),
        cluster_id: None,
        created_at: clock.now(),
        revoked_at: None,
    }
}

/// At the first start: makes the first administrator's token. Its text is in `file` (mode 0600)
/// before it counts, so that it is not lost when the start is interrupted.
///
/// # Errors
/// When the file cannot be written or the database fails.
pub async fn first_administrator(
    store: &dyn Store,
    clock: &dyn Clock,
    person: &Person,
    file: &Path,
    given: bool,
) -> anyhow::Result<()> {
    // One that somebody gives counts whatever others there are, so that it can be replaced.
    if !given && store.has_administrator().await? {
        return Ok(());
    }
    let path = file.to_owned();
    let text = tokio::task::spawn_blocking(move || {
        if let Ok(text) = std::fs::read_to_string(&path) {
            let text = text.trim();
            if !is_administrators(text) {
                return Err(std::io::Error::other("it holds no token of ours; remove it, and a new one is made"));
            }
            return Ok(text.to_owned());
        }
        if given {
            return Err(std::io::Error::other("it is not there, or cannot be read; `styrmin-server keys` makes one"));
        }
        let (text, _) = new_token(TokenKind::Administrator);
        write_private(&path, &text).map(|()| text)
    })
    .await?
    .with_context(|| format!("token file {}", file.display()))?;
    match store.insert_token(&administrator(clock, person, hash(&text))).await {
        // Another replica was faster with the same file.
        Err(StoreError::Exists) => {}
        other => {
            other?;
            info!(file = %file.display(), "an administrator's token was added");
        }
    }
    Ok(())
}

/// Whether a text is an administrator's token, by its looks.
#[must_use]
pub fn is_administrators(text: &str) -> bool {
    text.len() >= PREFIX_ADMINISTRATOR.len() + 40 && text.starts_with(PREFIX_ADMINISTRATOR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn tokens_come_as_bearer_or_as_password() {
        let with = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, HeaderValue::from_str(value).unwrap());
            presented(&headers)
        };
        assert_eq!(with("Bearer abc").as_deref(), Some("abc"));
        assert_eq!(with(&format!("Basic {}", STANDARD.encode("any:abc"))).as_deref(), Some("abc"));
        assert_eq!(with("Digest abc"), None);
        assert_eq!(with(&format!("Bearer {}", "x".repeat(2000))), None);
    }

    #[test]
    fn names_that_would_forge_a_commit_are_refused() {
        assert!(check_person("Ann Example", "ann@example.com").is_ok());
        for (name, email) in [
            ("", "a@b"),
            ("'", "a@b"),
            (";;", "a@b"),
            ("Ann\nStyrmin-Instance: x", "a@b"),
            ("Ann <x>", "a@b"),
            ("Ann", "ab"),
            ("Ann", "a@b\n"),
        ] {
            assert!(check_person(name, email).is_err(), "{name:?} {email:?}");
        }
    }
}

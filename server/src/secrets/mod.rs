//! Secret values: encrypted at rest with the server's key, and for Git with the cluster's.
//!
//! A plain value enters with a mutation, is sealed at once, and leaves only inside
//! [`sops::encrypt`]. [`Plain`] has neither `Display` nor a telling `Debug`, so that it cannot
//! reach a log, an error or an answer by accident.

pub mod sops;

use aes_gcm::aead::{Aead, KeyInit, Payload};
use aes_gcm::{Aes256Gcm, Key, Nonce};
use anyhow::{Context as _, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::fmt;
use std::path::Path;
use styrmin_renderer::canonical::hex;

/// Bytes of the server's key.
pub const KEY_LENGTH: usize = 32;
const NONCE_LENGTH: usize = 12;

/// A secret in clear.
#[derive(Clone, PartialEq, Eq)]
pub struct Plain(String);

impl Plain {
    /// Takes a secret in.
    #[must_use]
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// The text, for encryption and for checks against the driver's schema only.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Plain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

/// The server's key: everything at rest is sealed with it.
pub struct ServerKey {
    encryption: Aes256Gcm,
    fingerprint: [u8; KEY_LENGTH],
}

impl fmt::Debug for ServerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[server key]")
    }
}

impl ServerKey {
    /// Uses this key. Encryption and fingerprints get keys of their own derived from it.
    #[must_use]
    pub fn new(key: &[u8; KEY_LENGTH]) -> Self {
        let encryption = derive(key, b"styrmin encryption at rest v1");
        Self {
            encryption: Aes256Gcm::new(Key::<Aes256Gcm>::from_slice(&encryption)),
            fingerprint: derive(key, b"styrmin fingerprint v1"),
        }
    }

    /// Reads a key written as base64.
    ///
    /// # Errors
    /// When it is not base64 of 32 bytes. The message does not contain it.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let bytes = STANDARD.decode(text.trim()).context("the server key is not base64")?;
        let Ok(key) = <[u8; KEY_LENGTH]>::try_from(bytes.as_slice()) else {
            bail!("the server key must be {KEY_LENGTH} bytes as base64; it has {}", bytes.len());
        };
        Ok(Self::new(&key))
    }

    /// Reads the key file, and makes it when it does not exist (mode 0600).
    ///
    /// # Errors
    /// When the file can be neither read nor made, or holds no key.
    pub fn from_file(path: &Path) -> anyhow::Result<Self> {
        let text = private_text(path, || Ok(STANDARD.encode(rand::random::<[u8; KEY_LENGTH]>())));
        text.and_then(|text| Self::parse(&text)).with_context(|| format!("key file {}", path.display()))
    }

    /// Encrypts `plain`; `place` (what it belongs to) must be the same for [`Self::open`].
    ///
    /// # Errors
    /// When the text is too long for the cipher (64 GiB).
    pub fn seal(&self, place: &str, plain: &Plain) -> anyhow::Result<Vec<u8>> {
        let nonce: [u8; NONCE_LENGTH] = rand::random();
        let payload = Payload { msg: plain.expose().as_bytes(), aad: place.as_bytes() };
        let Ok(sealed) = self.encryption.encrypt(Nonce::from_slice(&nonce), payload) else {
            bail!("{place}: the secret could not be encrypted");
        };
        Ok([nonce.as_slice(), &sealed].concat())
    }

    /// Decrypts what [`Self::seal`] made.
    ///
    /// # Errors
    /// When it was sealed with another key or for another place. The message names the place.
    pub fn open(&self, place: &str, sealed: &[u8]) -> anyhow::Result<Plain> {
        let opened = sealed.split_at_checked(NONCE_LENGTH).and_then(|(nonce, message)| {
            let payload = Payload { msg: message, aad: place.as_bytes() };
            self.encryption.decrypt(Nonce::from_slice(nonce), payload).ok()
        });
        let Some(text) = opened.and_then(|bytes| String::from_utf8(bytes).ok()) else {
            bail!("{place}: the stored secret cannot be decrypted; is this the server key that encrypted it?");
        };
        Ok(Plain(text))
    }

    /// A keyed hash of 16 digits: equal for equal values of one place, and telling nothing else.
    #[must_use]
    pub fn fingerprint(&self, place: &str, plain: &Plain) -> String {
        let text = [place.as_bytes(), &[0], plain.expose().as_bytes()].concat();
        hex(&hmac(&self.fingerprint, &text)[..8])
    }
}

/// The place of a deployment's secret parameter.
#[must_use]
pub fn parameter_place(deployment: &str, parameter: &str) -> String {
    format!("deployment {deployment} parameter {parameter}")
}

/// The place of a cluster's Git credentials.
#[must_use]
pub fn credentials_place(cluster: &str) -> String {
    format!("cluster {cluster} Git credentials")
}

/// The place of what opens a cluster's forge.
#[must_use]
pub fn forge_place(cluster: &str) -> String {
    format!("cluster {cluster} forge")
}

fn derive(key: &[u8], purpose: &[u8]) -> [u8; KEY_LENGTH] {
    hmac(key, purpose)
}

fn hmac(key: &[u8], message: &[u8]) -> [u8; KEY_LENGTH] {
    #[expect(clippy::expect_used, reason = "HMAC takes keys of every length")]
    let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(key).expect("any length");
    mac.update(message);
    mac.finalize().into_bytes().into()
}

/// The text of a file that only its owner can read; `make` says it when there is none yet.
///
/// # Errors
/// When the file can be neither read nor made.
pub fn private_text(path: &Path, make: impl FnOnce() -> anyhow::Result<String>) -> anyhow::Result<String> {
    match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let text = make()?;
            write_private(path, &text)?;
            Ok(text)
        }
        other => Ok(other?),
    }
}

/// Writes a file that only its owner can read, as a whole or not at all.
///
/// # Errors
/// When the folder does not exist, is full, or the file exists already.
pub fn write_private(path: &Path, text: &str) -> std::io::Result<()> {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(text.as_bytes())?;
    file.write_all(b"\n")?;
    file.sync_all()?;
    // Linking fails when the file exists: a key is never overwritten.
    let linked = std::fs::hard_link(&temporary, path);
    std::fs::remove_file(&temporary)?;
    linked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_secret_opens_only_in_its_place_and_with_its_key() {
        let (key, other) = (ServerKey::new(&[1; 32]), ServerKey::new(&[2; 32]));
        let plain = Plain::new("hunter2".into());
        let sealed = key.seal("a", &plain).unwrap();
        assert_eq!(key.open("a", &sealed).unwrap(), plain);
        assert!(!sealed.windows(7).any(|window| window == b"hunter2"));
        for result in [key.open("b", &sealed), other.open("a", &sealed), key.open("a", &sealed[..5])] {
            assert!(!result.unwrap_err().to_string().contains("hunter2"));
        }
        assert_eq!(format!("{plain:?} {key:?}"), "[secret] [server key]");
    }

    #[test]
    fn fingerprints_depend_on_value_place_and_key() {
        let (key, other) = (ServerKey::new(&[1; 32]), ServerKey::new(&[2; 32]));
        let plain = Plain::new("hunter2".into());
        let one = key.fingerprint("a", &plain);
        assert_eq!(one.len(), 16);
        assert_eq!(one, key.fingerprint("a", &plain));
        assert_ne!(one, key.fingerprint("b", &plain));
        assert_ne!(one, other.fingerprint("a", &plain));
        assert_ne!(one, key.fingerprint("a", &Plain::new("hunter3".into())));
    }

    #[test]
    fn the_key_file_is_made_once_and_private() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let sealed = ServerKey::from_file(&path).unwrap().seal("a", &Plain::new("x".into())).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(ServerKey::from_file(&path).unwrap().open("a", &sealed).is_ok());
        assert!(write_private(&path, "other").is_err());
        std::fs::write(&path, "short").unwrap();
        assert!(!format!("{:#}", ServerKey::from_file(&path).unwrap_err()).contains("short"));
    }
}

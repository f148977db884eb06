//! Signs commits with an SSH key, as `git commit -S` with `gpg.format = ssh` does: Flux and forges verify them.

use crate::secrets::private_text;
use anyhow::{Context as _, bail};
use ssh_key::private::{Ed25519Keypair, Ed25519PrivateKey};
use ssh_key::{HashAlg, LineEnding, PrivateKey, PublicKey};
use std::path::Path;

/// What Git calls the kind of what is signed.
const NAMESPACE: &str = "git";
/// Comment of a key that the server made.
const COMMENT: &str = "styrmin";

/// The server's signing key.
pub struct Signer {
    key: PrivateKey,
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[signing key]")
    }
}

impl Signer {
    /// Reads an OpenSSH private key.
    ///
    /// # Errors
    /// When it is none, has a passphrase, or is of another kind than Ed25519. The message does not contain it.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let Ok(key) = PrivateKey::from_openssh(text) else {
            bail!("is not an OpenSSH private key; make one with `ssh-keygen -t ed25519 -N ''`");
        };
        if key.is_encrypted() {
            bail!("has a passphrase, which nobody could type here; make one with `ssh-keygen -t ed25519 -N ''`");
        }
        if key.key_data().ed25519().is_none() {
            bail!("is of the kind {}; make one with `ssh-keygen -t ed25519 -N ''`", key.algorithm());
        }
        Ok(Self { key })
    }

    /// Reads the key file, and makes it when it does not exist (mode 0600).
    ///
    /// # Errors
    /// When the file can be neither read nor made, or holds no key.
    pub fn from_file(path: &Path) -> anyhow::Result<Self> {
        let text = private_text(path, || {
            let private = Ed25519PrivateKey::from_bytes(&rand::random());
            let key = PrivateKey::new(Ed25519Keypair::from(private).into(), COMMENT)?;
            Ok(key.to_openssh(LineEnding::LF)?.trim_end().to_owned())
        });
        text.and_then(|text| Self::parse(&text)).with_context(|| format!("signing key {}", path.display()))
    }

    /// The public key, as a line of `authorized_keys`.
    #[must_use]
    pub fn public_key(&self) -> String {
        // Of a key that was read, this cannot fail.
        self.key.public_key().to_openssh().unwrap_or_default()
    }

    /// The signature of a commit without one.
    ///
    /// # Errors
    /// When the key cannot sign.
    pub fn sign(&self, commit: &[u8]) -> Result<String, ssh_key::Error> {
        self.key.sign(NAMESPACE, HashAlg::Sha512, commit)?.to_pem(LineEnding::LF)
    }
}

/// Checks a public key that commits of others are verified with: a line of `authorized_keys`, or an armored OpenPGP
/// key. Gives the suffix of its name in the Secret that Flux reads.
///
/// # Errors
/// What it is not.
pub fn key_suffix(text: &str) -> Result<&'static str, String> {
    let text = text.trim();
    if text.starts_with("-----BEGIN PGP PUBLIC KEY BLOCK-----") && text.ends_with("-----END PGP PUBLIC KEY BLOCK-----")
    {
        return Ok(".asc");
    }
    match PublicKey::from_openssh(text) {
        Ok(_) if !text.contains('\n') => Ok(".sshpub"),
        _ => {
            Err("is neither an SSH public key (`ssh-ed25519 AAAA… name`) nor an armored OpenPGP public key".to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_file_is_made_once_and_signs_the_same_after_that() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("signing.key");
        let (one, two) = (Signer::from_file(&path).unwrap(), Signer::from_file(&path).unwrap());
        assert_eq!(one.public_key(), two.public_key());
        assert!(one.public_key().starts_with("ssh-ed25519 ") && key_suffix(&one.public_key()) == Ok(".sshpub"));
        let signature: ssh_key::SshSig = two.sign(b"tree x\n").unwrap().parse().unwrap();
        assert!(one.key.public_key().verify(NAMESPACE, b"tree x\n", &signature).is_ok());
        assert!(one.key.public_key().verify(NAMESPACE, b"tree y\n", &signature).is_err());
        assert_eq!(format!("{one:?}"), "[signing key]");
    }

    #[test]
    fn what_is_no_key_is_refused_without_being_shown() {
        for text in ["", "hunter2", "-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2\n-----END OPENSSH PRIVATE KEY-----\n"]
        {
            let error = format!("{:#}", Signer::parse(text).unwrap_err());
            assert!(error.contains("ssh-keygen") && !error.contains("hunter2"), "{error}");
        }
        for text in ["", "ssh-ed25519", "ssh-ed25519 AAAA x", "-----BEGIN PGP PUBLIC KEY BLOCK-----"] {
            assert!(key_suffix(text).is_err(), "{text}");
        }
    }
}

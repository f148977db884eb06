//! A Kubernetes Secret in the SOPS file format, which `sops` and kustomize-controller decrypt.
//!
//! Values below `stringData` are encrypted one by one with a data key (AES-256-GCM, 32-byte nonce,
//! the path as additional data), the data key with age for each recipient, and a MAC over all
//! values keeps the file whole. Keys, names and annotations stay readable for reviewers.

use super::Plain;
use aes_gcm::aead::consts::U32;
use aes_gcm::aead::{Aead, KeyInit, Payload};
use aes_gcm::aes::Aes256;
use aes_gcm::{AesGcm, Key, Nonce};
use anyhow::{Context as _, anyhow, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha512};
use std::collections::BTreeMap;
use std::io::Write as _;
use styrmin_renderer::yaml;

/// SOPS uses a nonce of 32 bytes.
type Cipher = AesGcm<Aes256, U32>;

/// Annotation prefix: `fingerprint.styrmin.io/<key>`, which tells a reviewer and the operator
/// which value is in the file.
pub const FINGERPRINT_PREFIX: &str = "fingerprint.styrmin.io/";
/// The section that is encrypted.
const SECTION: &str = "stringData";
/// The version of the format, as `sops` writes it.
const VERSION: &str = "3.10.0";

/// A Secret to be written to Git.
#[derive(Debug)]
pub struct SecretFile<'a> {
    /// Name of the Secret.
    pub name: &'a str,
    /// Its namespace.
    pub namespace: &'a str,
    /// Its labels.
    pub labels: Value,
    /// Key → value and fingerprint.
    pub values: &'a BTreeMap<String, (Plain, String)>,
}

/// Checks an age recipient (`age1…`).
///
/// # Errors
/// When it is not one.
pub fn parse_recipient(text: &str) -> anyhow::Result<age::x25519::Recipient> {
    text.parse().map_err(|reason| anyhow!("\"{text}\" is not an age recipient (age1…): {reason}"))
}

/// Encrypts `file` for `recipients`. Every call gives other bytes (fresh keys and nonces): keep
/// the file while its content stays the same.
///
/// # Errors
/// When a recipient is not one or the cipher fails. Never names a value.
pub fn encrypt(file: &SecretFile<'_>, recipients: &[String], now: jiff::Timestamp) -> anyhow::Result<String> {
    if recipients.is_empty() {
        bail!("Secret {}: there is no recipient to encrypt for", file.name);
    }
    let data_key: [u8; 32] = rand::random();
    let cipher = Cipher::new(Key::<Cipher>::from_slice(&data_key));
    let modified = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();

    let mut annotations = Map::new();
    for (key, (_, fingerprint)) in file.values {
        annotations.insert(format!("{FINGERPRINT_PREFIX}{key}"), Value::from(fingerprint.as_str()));
    }
    let mut document = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "annotations": annotations,
            "labels": file.labels,
            "name": file.name,
            "namespace": file.namespace,
        },
        SECTION: file.values.iter().map(|(key, (plain, _))| (key.clone(), Value::from(plain.expose()))).collect::<Map<_, _>>(),
        "type": "Opaque",
    });
    // The MAC is over every value in the order of the file: ours is sorted by key.
    let mut mac = Sha512::new();
    digest_values(&document, &mut mac);
    let mac = mac.finalize().iter().map(|byte| format!("{byte:02X}")).collect::<String>();

    for (key, (plain, _)) in file.values {
        let place = format!("{SECTION}:{key}:");
        document[SECTION][key] = Value::from(encrypt_value(&cipher, plain.expose(), &place)?);
    }
    let keys = recipients
        .iter()
        .map(|recipient| Ok(json!({ "recipient": recipient, "enc": wrap(&data_key, recipient)? })))
        .collect::<anyhow::Result<Vec<_>>>()?;
    document["sops"] = json!({
        "age": keys,
        "encrypted_regex": format!("^(data|{SECTION})$"),
        "lastmodified": modified,
        "mac": encrypt_value(&cipher, &mac, &modified)?,
        "version": VERSION,
    });
    yaml::to_string(&document).context("the encrypted Secret cannot be written")
}

fn digest_values(value: &Value, mac: &mut Sha512) {
    match value {
        Value::Object(map) => map.values().for_each(|child| digest_values(child, mac)),
        Value::Array(items) => items.iter().for_each(|child| digest_values(child, mac)),
        Value::String(text) => mac.update(text.as_bytes()),
        // A Secret of ours has only strings.
        _ => {}
    }
}

fn encrypt_value(cipher: &Cipher, plain: &str, place: &str) -> anyhow::Result<String> {
    // SOPS leaves an empty string as it is.
    if plain.is_empty() {
        return Ok(String::new());
    }
    let nonce: [u8; 32] = rand::random();
    let payload = Payload { msg: plain.as_bytes(), aad: place.as_bytes() };
    let Ok(sealed) = cipher.encrypt(Nonce::<U32>::from_slice(&nonce), payload) else {
        bail!("{place} the value could not be encrypted");
    };
    let (data, tag) = sealed.split_at(sealed.len() - 16);
    Ok(format!(
        "ENC[AES256_GCM,data:{},iv:{},tag:{},type:str]",
        STANDARD.encode(data),
        STANDARD.encode(nonce),
        STANDARD.encode(tag)
    ))
}

/// The data key for one recipient, as armored age.
fn wrap(data_key: &[u8], recipient: &str) -> anyhow::Result<String> {
    let recipient = parse_recipient(recipient)?;
    let encryptor = age::Encryptor::with_recipients(std::iter::once(&recipient as &dyn age::Recipient))?;
    let mut armored = Vec::new();
    let armor = age::armor::ArmoredWriter::wrap_output(&mut armored, age::armor::Format::AsciiArmor)?;
    let mut writer = encryptor.wrap_output(armor)?;
    writer.write_all(data_key)?;
    writer.finish()?.finish()?;
    String::from_utf8(armored).context("age's armor is not text")
}

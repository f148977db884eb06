//! Whether a webhook comes from the forge: its signature over the body, or its token. What it says is not read: it is
//! a reason to look.

use crate::store::ForgeKind;
use hmac::{Hmac, Mac as _};
use sha2::Sha256;

/// The header that says who sends.
fn signed_by(kind: ForgeKind) -> &'static str {
    match kind {
        ForgeKind::Gitea => "x-gitea-signature",
        ForgeKind::Github => "x-hub-signature-256",
        ForgeKind::Gitlab => "x-gitlab-token",
    }
}

/// Whether a call claims to be one of a forge of this kind.
#[must_use]
pub fn is_signed<'a>(kind: ForgeKind, header: impl Fn(&str) -> Option<&'a str>) -> bool {
    header(signed_by(kind)).is_some()
}

/// Checks a webhook of a forge of this kind; `header` reads a header of the call.
#[must_use]
pub fn is_genuine<'a>(kind: ForgeKind, secret: &str, body: &[u8], header: impl Fn(&str) -> Option<&'a str>) -> bool {
    if secret.is_empty() {
        return false;
    }
    let given = header(signed_by(kind));
    match kind {
        ForgeKind::Gitea => given.is_some_and(|given| is_signature(secret, body, given)),
        ForgeKind::Github => {
            given.and_then(|given| given.strip_prefix("sha256=")).is_some_and(|given| is_signature(secret, body, given))
        }
        // GitLab sends the secret itself. Compared by its digest, so that time tells nothing.
        ForgeKind::Gitlab => given.is_some_and(|given| {
            let digest = signature(secret, given.as_bytes());
            digest.is_some_and(|digest| {
                signed(secret, secret.as_bytes()).is_some_and(|mac| mac.verify_slice(&digest).is_ok())
            })
        }),
    }
}

fn signed(secret: &str, text: &[u8]) -> Option<Hmac<Sha256>> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).ok()?;
    mac.update(text);
    Some(mac)
}

fn signature(secret: &str, text: &[u8]) -> Option<Vec<u8>> {
    signed(secret, text).map(|mac| mac.finalize().into_bytes().to_vec())
}

fn is_signature(secret: &str, body: &[u8], given: &str) -> bool {
    let digits = given.as_bytes().chunks(2);
    let bytes: Option<Vec<u8>> =
        digits.map(|pair| std::str::from_utf8(pair).ok().and_then(|pair| u8::from_str_radix(pair, 16).ok())).collect();
    match (bytes, signed(secret, body)) {
        (Some(bytes), Some(mac)) => mac.verify_slice(&bytes).is_ok(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(secret: &str, body: &[u8]) -> String {
        signature(secret, body).unwrap().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn only_who_knows_the_secret_is_believed() {
        let (secret, body) = ("0123456789abcdef", &b"{\"action\":\"closed\"}"[..]);
        let right = hex(secret, body);
        let prefixed = format!("sha256={right}");
        let gitea = |given: &str, body: &[u8]| {
            is_genuine(ForgeKind::Gitea, secret, body, |name| (name == "x-gitea-signature").then_some(given))
        };
        assert!(gitea(&right, body));
        assert!(!gitea(&right, b"{}"), "another body");
        assert!(!gitea(&hex("another secret..", body), body), "another secret");
        assert!(!gitea("", body) && !gitea("zz", body) && !gitea(&right[..32], body));
        let github = |given: &str| {
            is_genuine(ForgeKind::Github, secret, body, |name| (name == "x-hub-signature-256").then_some(given))
        };
        assert!(github(&prefixed) && !github(&right));
        let gitlab = |given: &str| {
            is_genuine(ForgeKind::Gitlab, secret, body, |name| (name == "x-gitlab-token").then_some(given))
        };
        assert!(gitlab(secret) && !gitlab("0123456789abcdeX") && !gitlab(""));
        assert!(!is_genuine(ForgeKind::Gitea, secret, body, |_| None), "no signature");
        assert!(!is_genuine(ForgeKind::Gitea, "", body, |_| Some(&right)), "no secret");
    }
}

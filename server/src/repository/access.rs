//! How the server gets into a repository elsewhere: what people give for it, checked, and handed to git in its
//! environment and in files that live as long as one command.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use ssh_key::PrivateKey;
use std::io::Write as _;
use std::path::Path;
use url::Url;

/// Largest field.
const FIELD_MAX: usize = 256 << 10;
/// Who logs in when nobody says.
const USER: &str = "git";

/// Everything that opens a repository. Sealed at rest; its `Debug` tells nothing.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Access {
    /// User of HTTPS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// Password or token of HTTPS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub password: Option<String>,
    /// Private key of SSH.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ssh_key: Option<String>,
    /// Lines of `known_hosts`: the only hosts that SSH trusts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub known_hosts: Option<String>,
    /// Certificates of authorities that HTTPS trusts instead of the machine's, as PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<String>,
    /// URL of a proxy for HTTPS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy: Option<String>,
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[access]")
    }
}

impl Access {
    /// Nothing is needed.
    #[must_use]
    pub fn is_open(&self) -> bool {
        *self == Self::default()
    }

    /// As it is sealed.
    #[must_use]
    pub fn to_text(&self) -> String {
        // Strings only: this cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads what was sealed. Earlier releases sealed `user:password`.
    #[must_use]
    pub fn from_text(text: &str) -> Self {
        serde_json::from_str(text).unwrap_or_else(|_| {
            let (user, password) = text.split_once(':').unwrap_or((USER, text));
            Self { username: Some(user.to_owned()), password: Some(password.to_owned()), ..Self::default() }
        })
    }

    /// `newer` where it says something, otherwise as before: so a token is replaced without the rest.
    #[must_use]
    pub fn replaced_by(self, newer: Self) -> Self {
        Self {
            username: newer.username.or(self.username),
            password: newer.password.or(self.password),
            ssh_key: newer.ssh_key.or(self.ssh_key),
            known_hosts: newer.known_hosts.or(self.known_hosts),
            ca: newer.ca.or(self.ca),
            proxy: newer.proxy.or(self.proxy),
        }
    }

    /// Checks what opens the repository at `url`.
    ///
    /// # Errors
    /// Field and remedy, without any value.
    pub fn check(&self, url: &str) -> Result<(), (&'static str, String)> {
        let wrong = |field, message: &str| Err((field, message.to_owned()));
        let fields = [
            ("git.username", &self.username),
            ("git.password", &self.password),
            ("git.ssh_key", &self.ssh_key),
            ("git.known_hosts", &self.known_hosts),
            ("git.ca", &self.ca),
            ("git.proxy", &self.proxy),
        ];
        for (field, value) in fields {
            if value.as_ref().is_some_and(|value| value.len() > FIELD_MAX || value.contains('\0')) {
                return wrong(field, "is too long, or no text");
            }
        }
        if self.username.as_ref().is_some_and(|user| user.contains([':', '\n', '\r'])) {
            return wrong("git.username", "must not contain ':' or a line break");
        }
        if self.password.as_ref().is_some_and(|password| password.contains(['\n', '\r'])) {
            return wrong("git.password", "must not contain a line break");
        }
        if self.username.is_some() && self.password.is_none() {
            return wrong("git.password", "is missing; a username alone opens nothing");
        }
        let is_http = url.starts_with("http://") || url.starts_with("https://");
        let is_ssh = !is_http && !url.starts_with("file:") && !url.starts_with('/');
        if !is_http && (self.password.is_some() || self.ca.is_some() || self.proxy.is_some()) {
            return wrong("git.url", "is not an HTTP URL; password, ca and proxy are for those");
        }
        if !is_ssh && (self.ssh_key.is_some() || self.known_hosts.is_some()) {
            return wrong("git.url", "is not an SSH URL; sshKey and knownHosts are for those");
        }
        if let Some(key) = &self.ssh_key {
            if !key.contains("-----BEGIN ") || !key.contains("PRIVATE KEY-----") {
                return wrong("git.ssh_key", "is not a private key; give what `ssh-keygen -t ed25519 -N ''` wrote");
            }
            if key.contains("ENCRYPTED") || PrivateKey::from_openssh(key).is_ok_and(|key| key.is_encrypted()) {
                return wrong("git.ssh_key", "has a passphrase, which nobody could type here; give one without");
            }
            if self.known_hosts.as_ref().is_none_or(|hosts| hosts.trim().is_empty()) {
                return wrong("git.known_hosts", "is missing; give the lines of `ssh-keyscan <host>`, once compared");
            }
        }
        if self.ca.as_ref().is_some_and(|ca| !ca.contains("-----BEGIN CERTIFICATE-----")) {
            return wrong("git.ca", "holds no certificate; give it as PEM");
        }
        if let Some(proxy) = &self.proxy {
            let schemes = ["http", "https", "socks5", "socks5h"];
            if Url::parse(proxy).is_err() || !schemes.iter().any(|scheme| proxy.starts_with(&format!("{scheme}://"))) {
                return wrong("git.proxy", "is not the URL of a proxy; http://host:port and socks5h://host:port are");
            }
        }
        Ok(())
    }

    /// Settings of git for this access, and the environment of ssh. What has to be a file is written into `folder`
    /// and goes with the value.
    pub(super) fn prepare(&self, folder: &Path) -> std::io::Result<Prepared> {
        let mut prepared = Prepared::default();
        if let Some(password) = &self.password {
            let user = self.username.as_deref().unwrap_or(USER);
            let pair = STANDARD.encode(format!("{user}:{password}"));
            prepared.settings.push(("http.extraHeader", format!("Authorization: Basic {pair}")));
        }
        if let Some(proxy) = &self.proxy {
            prepared.settings.push(("http.proxy", proxy.clone()));
        }
        if let Some(ca) = &self.ca {
            let path = prepared.file(folder, ca)?;
            prepared.settings.push(("http.sslCAInfo", path));
        }
        let mut ssh = SSH.to_owned();
        if let Some(hosts) = &self.known_hosts {
            let path = prepared.file(folder, hosts)?;
            ssh.push_str(&format!(
                " -o StrictHostKeyChecking=yes -o GlobalKnownHostsFile=/dev/null -o UserKnownHostsFile={}",
                quoted(&path)
            ));
        }
        if let Some(key) = &self.ssh_key {
            let path = prepared.file(folder, key)?;
            ssh.push_str(&format!(" -F /dev/null -o IdentitiesOnly=yes -i {}", quoted(&path)));
        }
        prepared.ssh = ssh;
        Ok(prepared)
    }
}

/// Never asks anybody anything.
const SSH: &str = "ssh -o BatchMode=yes -o ConnectTimeout=20";

/// What git gets of an access.
#[derive(Default)]
pub(super) struct Prepared {
    pub(super) settings: Vec<(&'static str, String)>,
    /// `GIT_SSH_COMMAND`.
    pub(super) ssh: String,
    files: Vec<tempfile::NamedTempFile>,
}

impl Prepared {
    /// Mode 0600, as the library makes them; ssh insists on it.
    fn file(&mut self, folder: &Path, text: &str) -> std::io::Result<String> {
        let mut file = tempfile::Builder::new().prefix("access-").tempfile_in(folder)?;
        file.write_all(text.trim_end().as_bytes())?;
        file.write_all(b"\n")?;
        let path = file.path().to_string_lossy().into_owned();
        self.files.push(file);
        Ok(path)
    }
}

/// For the shell that git hands the command to.
fn quoted(path: &str) -> String {
    format!("'{}'", path.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_opens_nothing_is_refused_without_being_shown() {
        let set = |change: fn(&mut Access)| {
            let mut access = Access::default();
            change(&mut access);
            access
        };
        let key = "-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2\n-----END OPENSSH PRIVATE KEY-----";
        let https = "https://h/r";
        for (url, access, field) in [
            (https, set(|access| access.username = Some("a".into())), "git.password"),
            (
                https,
                set(|access| (access.username, access.password) = (Some("a:b".into()), Some("hunter2".into()))),
                "git.username",
            ),
            (https, set(|access| access.password = Some("hunter2\nx".into())), "git.password"),
            (https, set(|access| access.ca = Some("hunter2".into())), "git.ca"),
            (https, set(|access| access.proxy = Some("hunter2".into())), "git.proxy"),
            (https, Access { ssh_key: Some(key.into()), ..Access::default() }, "git.url"),
            ("git@h:r", Access { ssh_key: Some(key.into()), ..Access::default() }, "git.known_hosts"),
            ("git@h:r", set(|access| access.ssh_key = Some("hunter2".into())), "git.ssh_key"),
            ("git@h:r", set(|access| access.password = Some("hunter2".into())), "git.url"),
        ] {
            let (is, message) = access.check(url).unwrap_err();
            assert_eq!(is, field, "{message}");
            assert!(!message.contains("hunter2"));
            assert_eq!(format!("{access:?}"), "[access]");
        }
        let full =
            Access { ssh_key: Some(key.into()), known_hosts: Some("h ssh-ed25519 A".into()), ..Access::default() };
        assert_eq!(full.check("ssh://git@h/r"), Ok(()));
        assert_eq!(Access::from_text(&full.to_text()), full);
    }

    #[test]
    fn what_an_earlier_release_sealed_can_be_read_and_replaced_in_part() {
        let old = Access::from_text("ann:hunter:2");
        assert_eq!((old.username.as_deref(), old.password.as_deref()), (Some("ann"), Some("hunter:2")));
        let new = old.replaced_by(Access { password: Some("other".into()), ..Access::default() });
        assert_eq!((new.username.as_deref(), new.password.as_deref()), (Some("ann"), Some("other")));
    }

    #[test]
    fn files_are_private_and_go_with_the_command() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let access = Access {
            ssh_key: Some("k".into()),
            known_hosts: Some("h".into()),
            ca: Some("c".into()),
            ..Access::default()
        };
        let prepared = access.prepare(folder.path()).unwrap();
        let entries = || std::fs::read_dir(folder.path()).unwrap().map(Result::unwrap).collect::<Vec<_>>();
        assert_eq!(entries().len(), 3);
        assert!(entries().iter().all(|entry| entry.metadata().unwrap().permissions().mode() & 0o777 == 0o600));
        assert!(prepared.ssh.contains("StrictHostKeyChecking=yes") && prepared.ssh.contains("IdentitiesOnly=yes"));
        drop(prepared);
        assert_eq!(entries().len(), 0);
    }
}

//! Where a cluster's files are, from what a person wrote: any spelling of a URL leads to the same
//! repository.

use url::Url;

/// A place in a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// The repository, however its URL is spelled: `host/path`, `file:/path` or `embedded:<id>`.
    pub repository: String,
    /// The branch.
    pub branch: String,
    /// The folder; empty for the root.
    pub path: String,
}

/// What is wrong with a field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocationProblem {
    /// Field of the input.
    pub field: &'static str,
    /// What is wrong and what to do.
    pub message: String,
}

/// The branch when nobody names one.
const DEFAULT_BRANCH: &str = "main";

impl Location {
    /// The repository of a cluster that this server hosts.
    #[must_use]
    pub fn embedded(cluster: &str) -> Self {
        Self { repository: format!("embedded:{cluster}"), branch: DEFAULT_BRANCH.into(), path: String::new() }
    }

    /// Reads what a person wrote.
    ///
    /// # Errors
    /// When it is no Git URL, contains credentials, or the branch or path is not one.
    pub fn parse(url: &str, branch: Option<&str>, path: Option<&str>) -> Result<Self, LocationProblem> {
        let repository = canonical(url).map_err(|message| LocationProblem { field: "git.url", message })?;
        let branch = branch.unwrap_or(DEFAULT_BRANCH);
        check_branch(branch).map_err(|message| LocationProblem { field: "git.branch", message })?;
        let path = path.unwrap_or_default().trim_matches('/');
        let wrong = |part: &str| {
            matches!(part.to_lowercase().as_str(), "" | "." | ".." | ".git" | "git~1")
                || part.chars().any(|c| c.is_control() || "\\\"'`$".contains(c))
        };
        if !path.is_empty() && path.split('/').any(wrong) {
            return Err(LocationProblem {
                field: "git.path",
                message: format!("\"{path}\" is not a folder in a repository"),
            });
        }
        Ok(Self { repository, branch: branch.to_owned(), path: path.to_owned() })
    }
}

/// Checks the name of a branch.
///
/// # Errors
/// What is wrong with it.
pub fn check_branch(branch: &str) -> Result<(), String> {
    if !git2::Reference::is_valid_name(&format!("refs/heads/{branch}")) || branch.starts_with('-') {
        return Err(format!("\"{branch}\" is not the name of a branch"));
    }
    Ok(())
}

/// Where people see a repository on its forge, and its path there: `https://host` and `owner/name`. `None`: it is a
/// folder.
#[must_use]
pub fn web_address(url: &str) -> Option<(String, String)> {
    let canonical = canonical(url).ok().filter(|place| !place.starts_with("file:"))?;
    let (scheme, rest) = match canonical.strip_prefix("http://") {
        Some(rest) => ("http", rest),
        None => ("https", canonical.as_str()),
    };
    let (host, project) = rest.split_once('/')?;
    // Over SSH the port is another one than the web's.
    let is_ssh = !url.starts_with("http");
    let host = if is_ssh { host.split(':').next().unwrap_or(host) } else { host };
    Some((format!("{scheme}://{host}"), project.to_owned()))
}

/// `https://H/r.git`, `https://h/r` and `git@h:r` are one repository.
fn canonical(text: &str) -> Result<String, String> {
    let shown =
        || "is not a Git URL; https://host/path, ssh://host/path, host:path and file:///path are possible".to_owned();
    if text.len() > 2048 || text.chars().any(|c| c.is_control() || c.is_whitespace()) || text.starts_with('-') {
        return Err(shown());
    }
    if text.starts_with('/') {
        return Ok(file(text));
    }
    if !text.contains("://") {
        // The scp-like form: [user@]host:path. "ext::" and its kin have no host.
        let (host, path) = text.split_once(':').ok_or_else(shown)?;
        let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
        let valid = !host.is_empty()
            && host.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
            && !path.starts_with(':')
            && !path.is_empty();
        return if valid { Ok(format!("{}/{}", host.to_lowercase(), trim(path))) } else { Err(shown()) };
    }
    let url = Url::parse(text).map_err(|_| shown())?;
    if url.password().is_some() || (url.scheme().starts_with("http") && !url.username().is_empty()) {
        return Err("contains credentials; give them as git.username and git.password".to_owned());
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err("must not have a query or fragment".to_owned());
    }
    match url.scheme() {
        "file" if url.host_str().is_none_or(str::is_empty) => Ok(file(url.path())),
        "http" | "https" | "ssh" => {
            let host = url.host_str().ok_or_else(shown)?.to_lowercase();
            let port = match (url.scheme(), url.port()) {
                (_, None) | ("ssh", Some(22)) => String::new(),
                (_, Some(port)) => format!(":{port}"),
            };
            let path = trim(url.path());
            // What goes over the wire in clear is another place: its credentials must not mix.
            let clear = if url.scheme() == "http" { "http://" } else { "" };
            if path.is_empty() { Err(shown()) } else { Ok(format!("{clear}{host}{port}/{path}")) }
        }
        _ => Err(shown()),
    }
}

/// A path on this machine: `/srv/r` and `/srv/r.git` may both exist, so `.git` counts.
fn file(path: &str) -> String {
    let parts: Vec<&str> = path.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
    format!("file:/{}", parts.join("/"))
}

fn trim(path: &str) -> &str {
    let path = path.trim_matches('/');
    path.strip_suffix(".git").unwrap_or(path)
}

/// Whether one folder lies in the other, or is it.
#[must_use]
pub fn overlap(one: &str, other: &str) -> bool {
    let inside = |inner: &str, outer: &str| {
        outer.is_empty() || inner == outer || inner.strip_prefix(outer).is_some_and(|rest| rest.starts_with('/'))
    };
    inside(one, other) || inside(other, one)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository(url: &str) -> Result<String, String> {
        Location::parse(url, None, None).map(|location| location.repository).map_err(|problem| problem.message)
    }

    #[test]
    fn every_spelling_is_one_repository() {
        for url in [
            "https://Host.example/o/r",
            "https://host.example/o/r.git",
            "https://host.example/o/r/",
            "git@host.example:o/r",
            "host.example:o/r.git",
            "ssh://git@host.example/o/r.git",
            "ssh://git@host.example:22/o/r",
        ] {
            assert_eq!(repository(url).unwrap(), "host.example/o/r", "{url}");
        }
        assert_eq!(repository("http://127.0.0.1:3000/o/r.git").unwrap(), "http://127.0.0.1:3000/o/r");
        assert_eq!(repository("file:///srv/r.git/").unwrap(), "file:/srv/r.git");
        assert_eq!(repository("/srv//r.git").unwrap(), "file:/srv/r.git");
    }

    #[test]
    fn what_is_no_url_or_holds_credentials_is_refused() {
        for url in [
            "",
            "host",
            "ext::sh -c x",
            "ext::x",
            "git://h/r",
            "https://",
            "https://h",
            "-oProxyCommand=x:y",
            "https://h/r?x=1",
            "https://h/r\n",
        ] {
            assert!(repository(url).is_err(), "{url}");
        }
        for url in ["https://me@h/r", "https://me:pw@h/r", "ssh://git:pw@h/r"] {
            let message = repository(url).unwrap_err();
            assert!(message.contains("credentials") && !message.contains("pw"), "{url}: {message}");
        }
        assert!(Location::parse("https://h/r", Some("a..b"), None).is_err());
        for path in ["..", "a/../b", "a//b", ".git", "a/.GIT", "git~1", "a\\b"] {
            assert!(Location::parse("https://h/r", None, Some(path)).is_err(), "{path}");
        }
        assert_eq!(Location::parse("https://h/r", None, Some("/a/b/")).unwrap().path, "a/b");
    }

    #[test]
    fn folders_overlap_when_one_lies_in_the_other() {
        assert!(overlap("", "a") && overlap("a", "") && overlap("a", "a") && overlap("a/b", "a"));
        assert!(!overlap("a", "b") && !overlap("ab", "a") && !overlap("a/b", "a/c"));
    }
}

//! HTTP to a forge: bounds, rate limits, redirects and errors, the same for all of them.

use super::{ForgeError, Result};
use crate::repository::Access;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, StatusCode};
use serde_json::Value;
use std::time::Duration;

/// How long a call may take.
const CALL_LIMIT: Duration = Duration::from_secs(30);
/// Largest answer.
const ANSWER_MAX: usize = 8 << 20;
/// How long to wait when a forge wants fewer calls and does not say when.
const WAIT: Duration = Duration::from_secs(60);
/// Longest wait that a forge may ask for.
const WAIT_MAX: Duration = Duration::from_secs(3600);
/// Most of a forge's words that people see.
const WORDS_MAX: usize = 300;

/// How to reach one repository on a forge.
#[derive(Clone)]
pub struct Connection {
    client: reqwest::Client,
    /// Base of the API, without a slash at the end.
    base: String,
    /// `owner/name`, or a path of groups.
    project: String,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("base", &self.base).field("project", &self.project).finish_non_exhaustive()
    }
}

/// What a forge answered.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: Value,
    message: String,
}

impl Connection {
    /// A connection that sends `header` with every call; certificates and proxy are those of the repository.
    ///
    /// # Errors
    /// When the header or something of the access is not usable; the message holds no secret.
    pub fn new(
        base: &str,
        project: &str,
        header: (&'static str, &str),
        access: &Access,
    ) -> std::result::Result<Self, String> {
        crate::tls::choose();
        let mut value = HeaderValue::from_str(header.1).map_err(|_| "the forge's token is no text".to_owned())?;
        value.set_sensitive(true);
        let mut headers = HeaderMap::new();
        headers.insert(HeaderName::from_static(header.0), value);
        headers.insert(reqwest::header::ACCEPT, HeaderValue::from_static("application/json"));
        headers.insert(reqwest::header::USER_AGENT, HeaderValue::from_static("styrmin"));
        let mut builder = reqwest::Client::builder()
            .default_headers(headers)
            .connect_timeout(Duration::from_secs(10))
            .timeout(CALL_LIMIT)
            // A repository that was renamed is somebody's decision to follow.
            .redirect(reqwest::redirect::Policy::none());
        if let Some(ca) = &access.ca {
            let certificates = reqwest::Certificate::from_pem_bundle(ca.as_bytes());
            builder = builder.tls_certs_only(certificates.map_err(|_| "git.ca: is no certificate".to_owned())?);
        }
        if let Some(proxy) = &access.proxy {
            let proxy = reqwest::Proxy::all(proxy).map_err(|_| "git.proxy: is no URL of a proxy".to_owned())?;
            builder = builder.proxy(proxy);
        }
        let client = builder.build().map_err(|error| format!("the forge cannot be called: {error}"))?;
        Ok(Self { client, base: base.trim_end_matches('/').to_owned(), project: project.to_owned() })
    }

    /// The repository on the forge.
    pub(super) fn project(&self) -> &str {
        &self.project
    }

    /// Calls; an answer that is no success is an error.
    pub(super) async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value> {
        let answer = self.ask(method, path, body).await?;
        match answer.status {
            200..=299 => Ok(answer.body),
            404 | 410 => Err(ForgeError::NotFound(path.trim_start_matches('/').to_owned())),
            status => Err(ForgeError::Refused { status, message: answer.message }),
        }
    }

    pub(super) async fn get(&self, path: &str) -> Result<Value> {
        self.call(Method::GET, path, None).await
    }

    pub(super) async fn post(&self, path: &str, body: &Value) -> Result<Value> {
        self.call(Method::POST, path, Some(body)).await
    }

    /// Asks for a merge: what says "not now" in every forge's way is [`ForgeError::NotYet`].
    pub(super) async fn merge(&self, method: Method, path: &str, body: &Value) -> Result<()> {
        let answer = self.ask(method, path, Some(body)).await?;
        match answer.status {
            200..=299 => Ok(()),
            // Not allowed now, head or base moved meanwhile, or rules of the branch that are not met.
            405 | 406 | 409 | 422 => Err(ForgeError::NotYet(answer.message)),
            404 => Err(ForgeError::NotFound(path.trim_start_matches('/').to_owned())),
            status => Err(ForgeError::Refused { status, message: answer.message }),
        }
    }

    /// Calls; every answer is one, but for those that mean the same everywhere.
    pub(super) async fn ask(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Answer> {
        let unreachable = |error: reqwest::Error| {
            let cause = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            ForgeError::Unreachable(format!("{}: {cause}", self.base))
        };
        let mut request = self.client.request(method, format!("{}{path}", self.base));
        if let Some(body) = body {
            request = request.json(body);
        }
        let mut response = request.send().await.map_err(unreachable)?;
        let (status, headers) = (response.status(), response.headers().clone());
        let mut bytes = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(unreachable)? {
            if bytes.len() + chunk.len() > ANSWER_MAX {
                return Err(ForgeError::Unreachable(format!("{}: the answer is too long", self.base)));
            }
            bytes.extend_from_slice(&chunk);
        }
        let body: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let message = words(&body, status);
        if status.is_redirection() {
            let to = headers.get(reqwest::header::LOCATION).and_then(|to| to.to_str().ok()).unwrap_or("unknown");
            return Err(ForgeError::Moved(to.to_owned()));
        }
        if let Some(wait) = limited(status, &headers, &message) {
            return Err(ForgeError::Limited { wait, message });
        }
        if status.is_server_error() {
            return Err(ForgeError::Unreachable(format!("{}: {message}", self.base)));
        }
        Ok(Answer { status: status.as_u16(), body, message })
    }
}

/// A forge's own words.
fn words(body: &Value, status: StatusCode) -> String {
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    // GitLab's are a text, a list, or a mapping of fields.
    let said = text(&body["message"]).or_else(|| text(&body["error"])).or_else(|| text(&body["error_description"]));
    let said = said.or_else(|| (!body["message"].is_null()).then(|| body["message"].to_string()));
    let more: Vec<String> = body["errors"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|error| text(error).or_else(|| text(&error["message"])))
        .collect();
    let said = said.unwrap_or_else(|| status.canonical_reason().unwrap_or("no reason given").to_owned());
    let all: Vec<String> = std::iter::once(said).chain(more).collect();
    super::short(&all.join("; "), WORDS_MAX)
}

/// How long to wait when the answer says that there were too many calls.
fn limited(status: StatusCode, headers: &HeaderMap, message: &str) -> Option<Duration> {
    let number =
        |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).and_then(|text| text.parse::<u64>().ok());
    let after = number("retry-after").map(Duration::from_secs);
    let exhausted = ["x-ratelimit-remaining", "ratelimit-remaining"].iter().any(|name| number(name) == Some(0));
    let said = message.to_ascii_lowercase();
    let is_limit = match status {
        StatusCode::TOO_MANY_REQUESTS => true,
        // GitHub refuses with 403, too, and its secondary limits count nothing.
        StatusCode::FORBIDDEN => exhausted || after.is_some() || said.contains("rate limit"),
        StatusCode::SERVICE_UNAVAILABLE => after.is_some(),
        _ => false,
    };
    if !is_limit {
        return None;
    }
    let until = || {
        let reset = number("x-ratelimit-reset").or_else(|| number("ratelimit-reset")).filter(|_| exhausted)?;
        // By the forge's own clock, whatever ours says.
        let now = headers.get("date").and_then(|date| date.to_str().ok())?;
        let now = jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(now).ok()?.as_second();
        Some(Duration::from_secs(reset.saturating_sub(u64::try_from(now).ok()?)))
    };
    Some(after.or_else(until).unwrap_or(WAIT).clamp(Duration::from_secs(1), WAIT_MAX))
}

//! What Styrmin asks of a forge: requests to merge, comments, commit statuses. One trait, [`Forge`]; one file for each
//! kind of forge, which knows its paths and its words.
//!
//! Gitea (and Forgejo) is proved against a real one in the end-to-end tests. GitHub and GitLab are made from their
//! published API documents and tested against answers of that shape only. What must never enter: decisions about
//! proposals; Git.

mod gitea;
mod github;
mod gitlab;
mod http;

pub use http::Connection;

use crate::store::{ForgeKind, MergeMethod};
use async_trait::async_trait;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Duration;

/// Why a forge did not do it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForgeError {
    /// It cannot be reached, or answers with a fault of its own.
    #[error("the forge does not answer: {0}")]
    Unreachable(String),
    /// It wants fewer calls: none before this time has passed.
    #[error("the forge wants no calls for {} s: {message}", wait.as_secs())]
    Limited {
        /// How long.
        wait: Duration,
        /// Its words.
        message: String,
    },
    /// The repository has another name by now.
    #[error(
        "the repository is somewhere else on the forge by now ({0}); give it its name back, or add the cluster with its new address"
    )]
    Moved(String),
    /// There is no such thing, or the token may not see it.
    #[error("the forge does not know {0}, or the token may not see it")]
    NotFound(String),
    /// It does not merge now.
    #[error("the forge does not merge yet: {0}")]
    NotYet(String),
    /// It said no.
    #[error("the forge refuses ({status}): {message}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// Its words.
        message: String,
    },
}

/// Result of a forge.
pub type Result<T> = std::result::Result<T, ForgeError>;

/// Where a request to merge is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestState {
    /// In review.
    Open,
    /// Merged.
    Merged,
    /// Closed without a merge.
    Closed,
}

/// A request to merge, as the forge shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MergeRequest {
    /// Its number in the repository.
    pub number: i64,
    /// Its page.
    pub url: String,
    /// Where it is.
    pub state: RequestState,
    /// The commit that its branch has, as far as the forge knows.
    pub head: String,
    /// The branch that it is for.
    pub base: String,
    /// The commit that the merge made.
    pub merge_commit: Option<String>,
    /// Who merged or closed it, when the forge says so.
    pub by: Option<String>,
    /// It is a draft.
    pub draft: bool,
    /// It can be merged without a conflict; `None`: the forge does not know yet.
    pub mergeable: Option<bool>,
}

/// What a new request is made of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NewRequest {
    /// The branch with the commits.
    pub head: String,
    /// The branch that they shall come to.
    pub base: String,
    /// Title.
    pub title: String,
    /// Description, as Markdown.
    pub body: String,
    /// Not ready for a merge yet.
    pub draft: bool,
}

/// A comment of somebody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Comment {
    /// Its id: later ones have higher ones.
    pub id: i64,
    /// Who.
    pub author: String,
    /// What.
    pub text: String,
}

/// What a commit came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusState {
    /// On its way.
    Pending,
    /// It runs.
    Success,
    /// It could not be made to run.
    Failure,
    /// It never will: something else took its place.
    Error,
}

/// A status of a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommitStatus {
    /// State.
    pub state: StatusState,
    /// Tells it from others of the commit.
    pub context: String,
    /// For people.
    pub description: String,
    /// Where people see more.
    pub url: String,
}

/// A forge, for one repository on it. Every call has a time limit; none is repeated here.
#[async_trait]
pub trait Forge: Send + Sync {
    /// Most characters of a description or comment.
    fn text_max(&self) -> usize;
    /// The newest request of this branch, also a closed one.
    async fn find(&self, head: &str) -> Result<Option<MergeRequest>>;
    /// One by its number.
    async fn get(&self, number: i64) -> Result<MergeRequest>;
    /// Opens a request.
    async fn open(&self, request: &NewRequest) -> Result<MergeRequest>;
    /// Asks people to review a request, and labels it. Those that the forge does not know are left out; gives why.
    async fn dress(&self, number: i64, reviewers: &[String], labels: &[String]) -> Result<Vec<String>>;
    /// Replaces title and description.
    async fn describe(&self, number: i64, title: &str, body: &str) -> Result<()>;
    /// Closes a request without a merge.
    async fn close(&self, number: i64) -> Result<()>;
    /// Whether it may be merged: checks passed, this many approvals of the present commit, nobody against it.
    /// `Err` of the inner result says what it waits for.
    async fn readiness(&self, request: &MergeRequest, approvals: u32) -> Result<std::result::Result<(), String>>;
    /// Merges it, if its branch still has this commit.
    async fn merge(&self, request: &MergeRequest, method: Option<MergeMethod>) -> Result<()>;
    /// Comments with ids above this one, oldest first.
    async fn comments(&self, number: i64, after: i64) -> Result<Vec<Comment>>;
    /// Says something below a request.
    async fn comment(&self, number: i64, text: &str) -> Result<()>;
    /// Says what a commit came to.
    async fn status(&self, commit: &str, status: &CommitStatus) -> Result<()>;
}

/// The forge of this kind, asked through `connection`.
#[must_use]
pub fn forge(kind: ForgeKind, connection: Connection) -> Box<dyn Forge> {
    match kind {
        ForgeKind::Gitea => Box::new(gitea::Gitea(connection)),
        ForgeKind::Github => Box::new(github::Github(connection)),
        ForgeKind::Gitlab => Box::new(gitlab::Gitlab(connection)),
    }
}

/// Comments of a list, with ids above `after`, oldest first; `author` is where the list has the names.
fn comments_of<'a>(
    found: impl IntoIterator<Item = &'a Value>,
    after: i64,
    (author, name): (&str, &str),
) -> Vec<Comment> {
    let comment = |value: &Value| {
        let id = value["id"].as_i64().filter(|id| *id > after && value["system"] != true)?;
        let author = value[author][name].as_str().unwrap_or("?").to_owned();
        Some(Comment { id, author, text: value["body"].as_str().unwrap_or_default().to_owned() })
    };
    let mut comments: Vec<Comment> = found.into_iter().filter_map(comment).collect();
    comments.sort_unstable_by_key(|comment| comment.id);
    comments
}

/// A text in one line, no longer than `most` characters.
fn short(text: &str, most: usize) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if text.chars().count() <= most {
        return text;
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

/// What somebody said last about the present commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Review {
    Approves,
    WantsChanges,
    /// Said something about an earlier commit, or took it back.
    Nothing,
}

/// What keeps people's reviews from being a yes, if anything: some are against it, or too few are for it.
fn judge_reviews(newest: &BTreeMap<String, Review>, wanted: u32) -> std::result::Result<(), String> {
    let approved = newest.values().filter(|review| **review == Review::Approves).count();
    let against = newest.iter().filter(|(_, review)| **review == Review::WantsChanges);
    let against: Vec<&str> = against.map(|(name, _)| name.as_str()).collect();
    if !against.is_empty() {
        return Err(format!("{} asked for changes", against.join(", ")));
    }
    let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
    if approved < wanted {
        return Err(format!("{approved} of {wanted} approvals are there"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;

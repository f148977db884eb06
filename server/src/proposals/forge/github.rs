//! GitHub, by its REST API (version 2022-11-28). Made from the published documents; not proved against GitHub itself.

use super::{
    Comment, CommitStatus, Connection, Forge, ForgeError, MergeRequest, NewRequest, RequestState, Result, Review,
    StatusState, comments_of, judge_reviews, short,
};
use crate::store::MergeMethod;
use async_trait::async_trait;
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Objects of a page.
const PAGE: usize = 100;
/// Most pages that are read of a list.
const PAGES_MAX: usize = 10;

/// Whose approvals count.
const MEMBERS: [&str; 3] = ["OWNER", "MEMBER", "COLLABORATOR"];

pub(super) struct Github(pub(super) Connection);

impl Github {
    fn path(&self, rest: &str) -> String {
        format!("/repos/{}{rest}", self.0.project())
    }

    async fn all(&self, path: &str, list: Option<&str>) -> Result<Vec<Value>> {
        let mut found = Vec::new();
        for page in 1..=PAGES_MAX {
            let mark = if path.contains('?') { '&' } else { '?' };
            let answer = self.0.get(&self.path(&format!("{path}{mark}per_page={PAGE}&page={page}"))).await?;
            let items = list.map_or(&answer, |list| &answer[list]).as_array().cloned().unwrap_or_default();
            let is_last = items.len() < PAGE;
            found.extend(items);
            if is_last {
                break;
            }
        }
        Ok(found)
    }
}

fn request(value: &Value) -> Result<MergeRequest> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let number = value["number"].as_i64();
    let number = number.ok_or_else(|| ForgeError::Unreachable("it answers with no pull request".to_owned()))?;
    // Lists say when it was merged, not whether.
    let is_merged = value["merged"].as_bool().unwrap_or_else(|| !value["merged_at"].is_null());
    let state = match value["state"].as_str() {
        _ if is_merged => RequestState::Merged,
        Some("open") => RequestState::Open,
        _ => RequestState::Closed,
    };
    Ok(MergeRequest {
        number,
        url: text(&value["html_url"]),
        state,
        head: text(&value["head"]["sha"]),
        base: text(&value["base"]["ref"]),
        // Of an open request it is a trial merge.
        merge_commit: value["merge_commit_sha"].as_str().filter(|_| is_merged).map(str::to_owned),
        by: value["merged_by"]["login"].as_str().map(str::to_owned),
        draft: value["draft"].as_bool().unwrap_or_default(),
        mergeable: value["mergeable"].as_bool(),
    })
}

#[async_trait]
impl Forge for Github {
    fn text_max(&self) -> usize {
        60_000
    }

    async fn find(&self, head: &str) -> Result<Option<MergeRequest>> {
        let owner = self.0.project().split('/').next().unwrap_or_default().to_owned();
        let found = self.0.get(&self.path(&format!("/pulls?state=all&head={owner}:{head}"))).await?;
        let newest = found.as_array().into_iter().flatten().max_by_key(|pull| pull["number"].as_i64());
        newest.map(request).transpose()
    }

    async fn get(&self, number: i64) -> Result<MergeRequest> {
        request(&self.0.get(&self.path(&format!("/pulls/{number}"))).await?)
    }

    async fn open(&self, new: &NewRequest) -> Result<MergeRequest> {
        let NewRequest { head, base, title, body, draft } = new;
        let input = json!({ "head": head, "base": base, "title": title, "body": body, "draft": draft });
        request(&self.0.post(&self.path("/pulls"), &input).await?)
    }

    async fn dress(&self, number: i64, reviewers: &[String], labels: &[String]) -> Result<Vec<String>> {
        let mut notes = Vec::new();
        if !labels.is_empty() {
            let path = self.path(&format!("/issues/{number}/labels"));
            match self.0.post(&path, &json!({ "labels": labels })).await {
                Err(ForgeError::Refused { message, .. }) => notes.push(format!("labels: {message}")),
                other => drop(other?),
            }
        }
        for name in reviewers {
            let path = self.path(&format!("/pulls/{number}/requested_reviewers"));
            // A team is written with its organisation.
            let body = match name.split_once('/') {
                Some((_, team)) => json!({ "team_reviewers": [team] }),
                None => json!({ "reviewers": [name] }),
            };
            match self.0.post(&path, &body).await {
                Err(ForgeError::Refused { message, .. }) => notes.push(format!("reviewer \"{name}\": {message}")),
                other => drop(other?),
            }
        }
        Ok(notes)
    }

    async fn describe(&self, number: i64, title: &str, body: &str) -> Result<()> {
        let path = self.path(&format!("/pulls/{number}"));
        self.0.call(Method::PATCH, &path, Some(&json!({ "title": title, "body": body }))).await.map(drop)
    }

    async fn close(&self, number: i64) -> Result<()> {
        let path = self.path(&format!("/pulls/{number}"));
        self.0.call(Method::PATCH, &path, Some(&json!({ "state": "closed" }))).await.map(drop)
    }

    async fn readiness(&self, request: &MergeRequest, approvals: u32) -> Result<std::result::Result<(), String>> {
        if request.draft {
            return Ok(Err("it is a draft".to_owned()));
        }
        match request.mergeable {
            Some(true) => {}
            Some(false) => return Ok(Err("it conflicts with its base".to_owned())),
            None => return Ok(Err("the forge still looks whether it can be merged".to_owned())),
        }
        let mut newest = BTreeMap::new();
        for review in self.all(&format!("/pulls/{}/reviews", request.number), None).await? {
            let state = review["state"].as_str().unwrap_or_default();
            let said = match state {
                "APPROVED" if review["commit_id"] != request.head => Review::Nothing,
                // Of somebody who does not belong to the repository: a passer-by.
                "APPROVED" if !MEMBERS.iter().any(|kind| review["author_association"] == *kind) => Review::Nothing,
                "APPROVED" => Review::Approves,
                "CHANGES_REQUESTED" => Review::WantsChanges,
                "DISMISSED" => Review::Nothing,
                _ => continue,
            };
            newest.insert(review["user"]["login"].as_str().unwrap_or("?").to_owned(), said);
        }
        if let Err(why) = judge_reviews(&newest, approvals) {
            return Ok(Err(why));
        }
        let statuses = self.0.get(&self.path(&format!("/commits/{}/status", request.head))).await?;
        // Without any status the combined state is "pending".
        let some = statuses["total_count"].as_i64().unwrap_or_default() > 0;
        match statuses["state"].as_str() {
            Some("pending") if some => return Ok(Err("checks are running".to_owned())),
            Some(state @ ("failure" | "error")) => return Ok(Err(format!("checks say {state}"))),
            _ => {}
        }
        for run in self.all(&format!("/commits/{}/check-runs", request.head), Some("check_runs")).await? {
            let name = run["name"].as_str().unwrap_or("a check");
            match (run["status"].as_str(), run["conclusion"].as_str()) {
                (Some("completed"), Some("success" | "neutral" | "skipped")) => {}
                (Some("completed"), other) => {
                    return Ok(Err(format!("check \"{name}\" says {}", other.unwrap_or("nothing"))));
                }
                _ => return Ok(Err(format!("check \"{name}\" is running"))),
            }
        }
        Ok(Ok(()))
    }

    async fn merge(&self, request: &MergeRequest, method: Option<MergeMethod>) -> Result<()> {
        let how = match method {
            None | Some(MergeMethod::Merge) => "merge",
            Some(MergeMethod::Squash) => "squash",
            Some(MergeMethod::Rebase) => "rebase",
        };
        let body = json!({ "sha": request.head, "merge_method": how });
        self.0.merge(Method::PUT, &self.path(&format!("/pulls/{}/merge", request.number)), &body).await
    }

    async fn comments(&self, number: i64, after: i64) -> Result<Vec<Comment>> {
        let found = self.all(&format!("/issues/{number}/comments"), None).await?;
        Ok(comments_of(&found, after, ("user", "login")))
    }

    async fn comment(&self, number: i64, text: &str) -> Result<()> {
        self.0.post(&self.path(&format!("/issues/{number}/comments")), &json!({ "body": text })).await.map(drop)
    }

    async fn status(&self, commit: &str, status: &CommitStatus) -> Result<()> {
        let state = match status.state {
            StatusState::Pending => "pending",
            StatusState::Success => "success",
            StatusState::Failure => "failure",
            StatusState::Error => "error",
        };
        let body = json!({
            "state": state,
            "context": status.context,
            "description": short(&status.description, 140),
            "target_url": status.url,
        });
        self.0.post(&self.path(&format!("/statuses/{commit}")), &body).await.map(drop)
    }
}

//! Gitea and Forgejo, by their API v1.

use super::{
    Comment, CommitStatus, Connection, Forge, ForgeError, MergeRequest, NewRequest, RequestState, Result, Review,
    StatusState, comments_of, judge_reviews, short,
};
use crate::store::MergeMethod;
use async_trait::async_trait;
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// How a title says that it is a draft.
const DRAFT: &str = "WIP: ";
/// Objects of a page.
const PAGE: usize = 50;
/// Most pages that are read of a list.
const PAGES_MAX: usize = 20;

pub(super) struct Gitea(pub(super) Connection);

impl Gitea {
    fn path(&self, rest: &str) -> String {
        format!("/api/v1/repos/{}{rest}", self.0.project())
    }

    async fn all(&self, path: &str) -> Result<Vec<Value>> {
        let mut found = Vec::new();
        for page in 1..=PAGES_MAX {
            let mark = if path.contains('?') { '&' } else { '?' };
            let answer = self.0.get(&self.path(&format!("{path}{mark}page={page}&limit={PAGE}"))).await?;
            let items = answer.as_array().cloned().unwrap_or_default();
            let is_last = items.len() < PAGE;
            found.extend(items);
            if is_last {
                break;
            }
        }
        Ok(found)
    }

    /// Ids of labels by their names; the second list has those that are not there.
    async fn labels(&self, names: &[String]) -> Result<(Vec<i64>, Vec<String>)> {
        if names.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        let known = self.all("/labels").await?;
        let id = |name: &String| known.iter().find(|label| label["name"] == **name).and_then(|l| l["id"].as_i64());
        let unknown = names.iter().filter(|name| id(name).is_none()).cloned().collect();
        Ok((names.iter().filter_map(id).collect(), unknown))
    }
}

fn request(value: &Value) -> Result<MergeRequest> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let number = value["number"].as_i64();
    let number = number.ok_or_else(|| ForgeError::Unreachable("it answers with no pull request".to_owned()))?;
    let state = match (value["merged"].as_bool(), value["state"].as_str()) {
        (Some(true), _) => RequestState::Merged,
        (_, Some("open")) => RequestState::Open,
        _ => RequestState::Closed,
    };
    Ok(MergeRequest {
        number,
        url: text(&value["html_url"]),
        state,
        head: text(&value["head"]["sha"]),
        base: text(&value["base"]["ref"]),
        merge_commit: value["merge_commit_sha"].as_str().filter(|_| state == RequestState::Merged).map(str::to_owned),
        by: value["merged_by"]["login"].as_str().map(str::to_owned),
        draft: value["draft"].as_bool().unwrap_or_default(),
        mergeable: value["mergeable"].as_bool(),
    })
}

#[async_trait]
impl Forge for Gitea {
    fn text_max(&self) -> usize {
        60_000
    }

    async fn find(&self, head: &str) -> Result<Option<MergeRequest>> {
        // Gitea's own search by branches finds open ones only.
        let found = self.all("/pulls?state=all&sort=recentupdate").await?;
        let newest = found.iter().filter(|pull| pull["head"]["ref"] == head || pull["head"]["label"] == head);
        newest.max_by_key(|pull| pull["number"].as_i64()).map(request).transpose()
    }

    async fn get(&self, number: i64) -> Result<MergeRequest> {
        request(&self.0.get(&self.path(&format!("/pulls/{number}"))).await?)
    }

    async fn open(&self, new: &NewRequest) -> Result<MergeRequest> {
        let title = if new.draft { format!("{DRAFT}{}", new.title) } else { new.title.clone() };
        let body = json!({ "head": new.head, "base": new.base, "title": title, "body": new.body });
        request(&self.0.post(&self.path("/pulls"), &body).await?)
    }

    async fn dress(&self, number: i64, reviewers: &[String], labels: &[String]) -> Result<Vec<String>> {
        let (labels, unknown) = self.labels(labels).await?;
        let mut notes: Vec<String> = unknown.iter().map(|name| format!("there is no label \"{name}\"")).collect();
        if !labels.is_empty() {
            self.0.post(&self.path(&format!("/issues/{number}/labels")), &json!({ "labels": labels })).await?;
        }
        // One by one, since one name that is not known would refuse all of them, and the request with them.
        for name in reviewers {
            let path = self.path(&format!("/pulls/{number}/requested_reviewers"));
            match self.0.post(&path, &json!({ "reviewers": [name] })).await {
                Err(ForgeError::Refused { message, .. }) => notes.push(format!("reviewer \"{name}\": {message}")),
                Err(ForgeError::NotFound(_)) => notes.push(format!("reviewer \"{name}\": is not known")),
                other => drop(other?),
            }
        }
        Ok(notes)
    }

    async fn describe(&self, number: i64, title: &str, body: &str) -> Result<()> {
        let path = self.path(&format!("/pulls/{number}"));
        // Whoever made it a draft, or ready, has decided that.
        let draft = self.get(number).await?.draft;
        let title = if draft { format!("{DRAFT}{title}") } else { title.to_owned() };
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
        if request.mergeable == Some(false) {
            return Ok(Err("it conflicts with its base, or the forge still looks at that".to_owned()));
        }
        let mut newest = BTreeMap::new();
        for review in self.all(&format!("/pulls/{}/reviews", request.number)).await? {
            let state = review["state"].as_str().unwrap_or_default();
            let is = |field: &str| review[field].as_bool().unwrap_or_default();
            let said = match state {
                "APPROVED" | "REQUEST_CHANGES" if is("dismissed") => Review::Nothing,
                // Of somebody who may not write: a passer-by.
                "APPROVED" if is("stale") || !is("official") => Review::Nothing,
                "APPROVED" => Review::Approves,
                "REQUEST_CHANGES" => Review::WantsChanges,
                _ => continue,
            };
            newest.insert(review["user"]["login"].as_str().unwrap_or("?").to_owned(), said);
        }
        if let Err(why) = judge_reviews(&newest, approvals) {
            return Ok(Err(why));
        }
        let checks = self.0.get(&self.path(&format!("/commits/{}/status", request.head))).await?;
        let none = checks["total_count"].as_i64().unwrap_or_default() == 0;
        Ok(match checks["state"].as_str() {
            _ if none => Ok(()),
            Some("success" | "warning" | "skipped") => Ok(()),
            Some("pending" | "") | None => Err("checks are running".to_owned()),
            Some(other) => Err(format!("checks say {other}")),
        })
    }

    async fn merge(&self, request: &MergeRequest, method: Option<MergeMethod>) -> Result<()> {
        let how = match method {
            None | Some(MergeMethod::Merge) => "merge",
            Some(MergeMethod::Squash) => "squash",
            Some(MergeMethod::Rebase) => "rebase",
        };
        let body = json!({ "do": how, "head_commit_id": request.head, "delete_branch_after_merge": true });
        self.0.merge(Method::POST, &self.path(&format!("/pulls/{}/merge", request.number)), &body).await
    }

    async fn comments(&self, number: i64, after: i64) -> Result<Vec<Comment>> {
        let found = self.0.get(&self.path(&format!("/issues/{number}/comments"))).await?;
        Ok(comments_of(found.as_array().into_iter().flatten(), after, ("user", "login")))
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
            "description": short(&status.description, 255),
            "target_url": status.url,
        });
        self.0.post(&self.path(&format!("/statuses/{commit}")), &body).await.map(drop)
    }
}

//! GitLab, by its REST API v4. Made from the published documents; not proved against GitLab itself.

use super::{
    Comment, CommitStatus, Connection, Forge, ForgeError, MergeRequest, NewRequest, RequestState, Result, Review,
    StatusState, comments_of, judge_reviews, short,
};
use crate::store::MergeMethod;
use async_trait::async_trait;
use reqwest::Method;
use serde_json::{Value, json};

/// How a title says that it is a draft.
const DRAFT: &str = "Draft: ";

pub(super) struct Gitlab(pub(super) Connection);

impl Gitlab {
    fn path(&self, rest: &str) -> String {
        format!("/projects/{}{rest}", encoded(self.0.project()))
    }
}

/// A path of groups as one segment of a URL, or a value of its query.
fn encoded(text: &str) -> String {
    url::form_urlencoded::byte_serialize(text.as_bytes()).collect::<String>().replace('+', "%20")
}

fn request(value: &Value) -> Result<MergeRequest> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let number = value["iid"].as_i64();
    let number = number.ok_or_else(|| ForgeError::Unreachable("it answers with no merge request".to_owned()))?;
    let state = match value["state"].as_str() {
        Some("merged") => RequestState::Merged,
        Some("opened" | "locked") => RequestState::Open,
        _ => RequestState::Closed,
    };
    // A fast-forward makes no commit of its own.
    let commits = ["merge_commit_sha", "squash_commit_sha", "sha"].map(|name| value[name].as_str());
    let by = value["merge_user"]["username"].as_str().or(value["closed_by"]["username"].as_str());
    let mergeable = match value["detailed_merge_status"].as_str() {
        Some("conflict" | "need_rebase") => Some(false),
        Some("unchecked" | "checking" | "preparing") | None => None,
        Some(_) => Some(true),
    };
    Ok(MergeRequest {
        number,
        url: text(&value["web_url"]),
        state,
        head: text(&value["sha"]),
        base: text(&value["target_branch"]),
        merge_commit: commits.into_iter().flatten().next().filter(|_| state == RequestState::Merged).map(str::to_owned),
        by: by.map(str::to_owned),
        draft: value["draft"].as_bool().unwrap_or_default(),
        mergeable,
    })
}

#[async_trait]
impl Forge for Gitlab {
    fn text_max(&self) -> usize {
        900_000
    }

    async fn find(&self, head: &str) -> Result<Option<MergeRequest>> {
        let path = format!("/merge_requests?state=all&source_branch={}", encoded(head));
        let found = self.0.get(&self.path(&path)).await?;
        let newest = found.as_array().into_iter().flatten().max_by_key(|found| found["iid"].as_i64());
        newest.map(request).transpose()
    }

    async fn get(&self, number: i64) -> Result<MergeRequest> {
        request(&self.0.get(&self.path(&format!("/merge_requests/{number}"))).await?)
    }

    async fn open(&self, new: &NewRequest) -> Result<MergeRequest> {
        let title = if new.draft { format!("{DRAFT}{}", new.title) } else { new.title.clone() };
        let body = json!({
            "source_branch": new.head,
            "target_branch": new.base,
            "title": title,
            "description": new.body,
            "remove_source_branch": true,
        });
        request(&self.0.post(&self.path("/merge_requests"), &body).await?)
    }

    async fn dress(&self, number: i64, reviewers: &[String], labels: &[String]) -> Result<Vec<String>> {
        let (mut notes, mut ids) = (Vec::new(), Vec::new());
        for name in reviewers {
            let found = self.0.get(&format!("/users?username={}", encoded(name))).await?;
            match found[0]["id"].as_i64() {
                Some(id) => ids.push(id),
                None => notes.push(format!("reviewer \"{name}\": is not known")),
            }
        }
        if !ids.is_empty() || !labels.is_empty() {
            let path = self.path(&format!("/merge_requests/{number}"));
            let body = json!({ "add_labels": labels.join(","), "reviewer_ids": ids });
            self.0.call(Method::PUT, &path, Some(&body)).await?;
        }
        Ok(notes)
    }

    async fn describe(&self, number: i64, title: &str, body: &str) -> Result<()> {
        let draft = self.get(number).await?.draft;
        let title = if draft { format!("{DRAFT}{title}") } else { title.to_owned() };
        let path = self.path(&format!("/merge_requests/{number}"));
        self.0.call(Method::PUT, &path, Some(&json!({ "title": title, "description": body }))).await.map(drop)
    }

    async fn close(&self, number: i64) -> Result<()> {
        let path = self.path(&format!("/merge_requests/{number}"));
        self.0.call(Method::PUT, &path, Some(&json!({ "state_event": "close" }))).await.map(drop)
    }

    async fn readiness(&self, request: &MergeRequest, approvals: u32) -> Result<std::result::Result<(), String>> {
        if request.draft {
            return Ok(Err("it is a draft".to_owned()));
        }
        let now = self.0.get(&self.path(&format!("/merge_requests/{}", request.number))).await?;
        let status = now["detailed_merge_status"].as_str().unwrap_or("unchecked");
        if status != "mergeable" {
            return Ok(Err(format!("the forge says {}", status.replace('_', " "))));
        }
        let found = self.0.get(&self.path(&format!("/merge_requests/{}/approvals", request.number))).await?;
        let approved = found["approved_by"].as_array().into_iter().flatten();
        let approved = approved.map(|by| (by["user"]["username"].as_str().unwrap_or("?").to_owned(), Review::Approves));
        if let Err(why) = judge_reviews(&approved.collect(), approvals) {
            return Ok(Err(why));
        }
        Ok(match now["head_pipeline"]["status"].as_str() {
            None | Some("success" | "skipped" | "manual") => Ok(()),
            Some(state @ ("failed" | "canceled")) => Err(format!("the pipeline has {state}")),
            Some(_) => Err("the pipeline is running".to_owned()),
        })
    }

    async fn merge(&self, request: &MergeRequest, method: Option<MergeMethod>) -> Result<()> {
        // How a merge looks otherwise is a setting of the project.
        let squash = method == Some(MergeMethod::Squash);
        let body = json!({ "sha": request.head, "squash": squash, "should_remove_source_branch": true });
        self.0.merge(Method::PUT, &self.path(&format!("/merge_requests/{}/merge", request.number)), &body).await
    }

    async fn comments(&self, number: i64, after: i64) -> Result<Vec<Comment>> {
        let path = format!("/merge_requests/{number}/notes?sort=desc&order_by=created_at&per_page=100");
        let found = self.0.get(&self.path(&path)).await?;
        Ok(comments_of(found.as_array().into_iter().flatten(), after, ("author", "username")))
    }

    async fn comment(&self, number: i64, text: &str) -> Result<()> {
        self.0.post(&self.path(&format!("/merge_requests/{number}/notes")), &json!({ "body": text })).await.map(drop)
    }

    async fn status(&self, commit: &str, status: &CommitStatus) -> Result<()> {
        let state = match status.state {
            StatusState::Pending => "pending",
            StatusState::Success => "success",
            StatusState::Failure => "failed",
            StatusState::Error => "canceled",
        };
        let body = json!({
            "state": state,
            "name": status.context,
            "description": short(&status.description, 255),
            "target_url": status.url,
        });
        self.0.post(&self.path(&format!("/statuses/{commit}")), &body).await.map(drop)
    }
}

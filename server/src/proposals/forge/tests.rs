//! Every forge against a server that answers as its published documents say: the same things are asked of each.

use super::{CommitStatus, Connection, Forge, ForgeError, MergeRequest, NewRequest, RequestState, StatusState, forge};
use crate::repository::Access;
use crate::store::{ForgeKind, MergeMethod};
use axum::Router;
use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

/// What a forge answers to one call.
struct Answer {
    call: &'static str,
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Value,
}

#[derive(Default)]
struct Script {
    answers: Mutex<Vec<Answer>>,
    /// Method, path with query, body, token.
    calls: Mutex<Vec<(String, Value, String)>>,
}

async fn answer(State(script): State<Arc<Script>>, request: Request) -> Response {
    let path = request.uri().path_and_query().map(ToString::to_string).unwrap_or_default();
    let call = format!("{} {path}", request.method());
    let token = request.headers().get("authorization").or(request.headers().get("private-token"));
    let token = token.and_then(|token| token.to_str().ok()).unwrap_or_default().to_owned();
    let bytes = to_bytes(request.into_body(), 1 << 20).await.unwrap();
    let body: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    script.calls.lock().unwrap().push((call.clone(), body, token));
    let mut answers = script.answers.lock().unwrap();
    let Some(index) = answers.iter().position(|answer| call == answer.call) else {
        return (StatusCode::NOT_FOUND, format!("{{\"message\":\"nothing for {call}\"}}")).into_response();
    };
    let answer = answers.remove(index);
    let mut headers = HeaderMap::new();
    for (name, value) in answer.headers {
        headers.insert(name, value.parse().unwrap());
    }
    (StatusCode::from_u16(answer.status).unwrap(), headers, answer.body.to_string()).into_response()
}

/// A forge of a kind whose calls are answered by the script.
async fn scripted(kind: ForgeKind, answers: Vec<Answer>) -> (Box<dyn Forge>, Arc<Script>) {
    let script = Arc::new(Script { answers: Mutex::new(answers), ..Script::default() });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = Router::new().fallback(answer).with_state(Arc::clone(&script));
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    let header = match kind {
        ForgeKind::Gitlab => ("private-token", "t0ken"),
        _ => ("authorization", "Bearer t0ken"),
    };
    let connection = Connection::new(&format!("http://{address}"), "group/cluster", header, &Access::default());
    (forge(kind, connection.unwrap()), script)
}

fn ok(call: &'static str, body: Value) -> Answer {
    Answer { call, status: 200, headers: Vec::new(), body }
}

fn refuses(call: &'static str, status: u16, body: Value) -> Answer {
    Answer { call, status, headers: Vec::new(), body }
}

fn github_pull(state: &str, merged: bool) -> Value {
    json!({
        "number": 7, "state": state, "title": "t", "draft": false, "merged": merged, "mergeable": true,
        "merge_commit_sha": "cccc", "html_url": "https://github.example/group/cluster/pull/7",
        "head": { "ref": "styrmin/front", "sha": "aaaa" }, "base": { "ref": "main", "sha": "bbbb" },
        "merged_by": if merged { json!({ "login": "rita" }) } else { Value::Null }
    })
}

fn gitlab_request(state: &str) -> Value {
    json!({
        "iid": 7, "state": state, "title": "t", "draft": false, "detailed_merge_status": "mergeable",
        "merge_commit_sha": if state == "merged" { json!("cccc") } else { Value::Null }, "squash_commit_sha": null,
        "sha": "aaaa", "web_url": "https://gitlab.example/group/cluster/-/merge_requests/7",
        "source_branch": "styrmin/front", "target_branch": "main",
        "merge_user": if state == "merged" { json!({ "username": "rita" }) } else { Value::Null },
        "head_pipeline": { "status": "success" }
    })
}

fn new_request() -> NewRequest {
    NewRequest { head: "styrmin/front".into(), base: "main".into(), title: "t".into(), body: "b".into(), draft: true }
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn calls(script: &Script) -> Vec<(String, Value)> {
    script.calls.lock().unwrap().iter().map(|(call, body, _)| (call.clone(), body.clone())).collect()
}

fn open(kind: ForgeKind) -> MergeRequest {
    let url = match kind {
        ForgeKind::Gitlab => "https://gitlab.example/group/cluster/-/merge_requests/7",
        _ => "https://github.example/group/cluster/pull/7",
    };
    MergeRequest {
        number: 7,
        url: url.into(),
        state: RequestState::Open,
        head: "aaaa".into(),
        base: "main".into(),
        merge_commit: None,
        by: None,
        draft: false,
        mergeable: Some(true),
    }
}

#[tokio::test]
async fn github_opens_a_request_with_reviewers_and_labels() {
    let (forge, script) = scripted(
        ForgeKind::Github,
        vec![
            refuses("POST /repos/group/cluster/pulls", 201, github_pull("open", false)),
            ok("POST /repos/group/cluster/issues/7/labels", json!([{ "name": "styrmin" }])),
            refuses("POST /repos/group/cluster/pulls/7/requested_reviewers", 201, github_pull("open", false)),
            refuses(
                "POST /repos/group/cluster/pulls/7/requested_reviewers",
                422,
                json!({ "message": "Reviews may only be requested from collaborators.", "documentation_url": "x" }),
            ),
        ],
    )
    .await;
    let opened = forge.open(&new_request()).await.unwrap();
    assert_eq!(opened, open(ForgeKind::Github));
    let notes = forge.dress(7, &names(&["rita", "nobody"]), &names(&["styrmin"])).await.unwrap();
    assert_eq!(notes, ["reviewer \"nobody\": Reviews may only be requested from collaborators."]);
    let asked = calls(&script);
    assert_eq!(
        asked[0].1,
        json!({ "head": "styrmin/front", "base": "main", "title": "t", "body": "b", "draft": true })
    );
    assert_eq!(asked[1].1, json!({ "labels": ["styrmin"] }));
    assert_eq!(asked[2].1, json!({ "reviewers": ["rita"] }));
    assert!(script.calls.lock().unwrap().iter().all(|(.., token)| token == "Bearer t0ken"));
}

#[tokio::test]
async fn gitlab_opens_a_request_with_reviewers_and_labels() {
    let (forge, script) = scripted(
        ForgeKind::Gitlab,
        vec![
            ok("GET /users?username=rita", json!([{ "id": 42, "username": "rita" }])),
            ok("GET /users?username=nobody", json!([])),
            refuses("POST /projects/group%2Fcluster/merge_requests", 201, gitlab_request("opened")),
            ok("PUT /projects/group%2Fcluster/merge_requests/7", gitlab_request("opened")),
        ],
    )
    .await;
    let opened = forge.open(&new_request()).await.unwrap();
    assert_eq!(opened, open(ForgeKind::Gitlab));
    let notes = forge.dress(7, &names(&["rita", "nobody"]), &names(&["styrmin"])).await.unwrap();
    assert_eq!(notes, ["reviewer \"nobody\": is not known"]);
    let asked = calls(&script);
    let expected = json!({
        "source_branch": "styrmin/front", "target_branch": "main", "title": "Draft: t", "description": "b",
        "remove_source_branch": true
    });
    assert_eq!(asked[0].1, expected);
    assert_eq!(asked[3].1, json!({ "add_labels": "styrmin", "reviewer_ids": [42] }));
}

#[tokio::test]
async fn the_request_of_a_branch_is_found_again_and_read() {
    let (forge, _) = scripted(
        ForgeKind::Github,
        vec![
            ok(
                "GET /repos/group/cluster/pulls?state=all&head=group:styrmin/front",
                json!([{ "number": 3, "state": "closed", "merged_at": null, "head": {}, "base": {} }, github_pull("open", false)]),
            ),
            ok("GET /repos/group/cluster/pulls/7", github_pull("closed", true)),
            ok("GET /repos/group/cluster/pulls/3", github_pull("closed", false)),
        ],
    )
    .await;
    assert_eq!(forge.find("styrmin/front").await.unwrap().map(|found| found.number), Some(7));
    let merged = forge.get(7).await.unwrap();
    assert_eq!(
        (merged.state, merged.merge_commit.as_deref(), merged.by.as_deref()),
        (RequestState::Merged, Some("cccc"), Some("rita"))
    );
    let closed = forge.get(3).await.unwrap();
    assert_eq!((closed.state, closed.merge_commit), (RequestState::Closed, None), "the trial merge is no merge");

    let (forge, _) = scripted(
        ForgeKind::Gitlab,
        vec![
            ok(
                "GET /projects/group%2Fcluster/merge_requests?state=all&source_branch=styrmin%2Ffront",
                json!([gitlab_request("opened")]),
            ),
            ok("GET /projects/group%2Fcluster/merge_requests/7", gitlab_request("merged")),
            ok("GET /projects/group%2Fcluster/merge_requests/8", gitlab_request("closed")),
        ],
    )
    .await;
    assert_eq!(forge.find("styrmin/front").await.unwrap().map(|found| found.number), Some(7));
    let merged = forge.get(7).await.unwrap();
    assert_eq!(
        (merged.state, merged.merge_commit.as_deref(), merged.by.as_deref()),
        (RequestState::Merged, Some("cccc"), Some("rita"))
    );
    assert_eq!(forge.get(8).await.unwrap().state, RequestState::Closed);
}

#[tokio::test]
async fn a_merge_waits_for_approvals_and_checks() {
    const REVIEWS: &str = "GET /repos/group/cluster/pulls/7/reviews?per_page=100&page=1";
    const STATUS: &str = "GET /repos/group/cluster/commits/aaaa/status";
    const RUNS: &str = "GET /repos/group/cluster/commits/aaaa/check-runs?per_page=100&page=1";
    let review = |user: &str, state: &str, commit: &str| json!({ "user": { "login": user }, "state": state, "commit_id": commit, "author_association": "MEMBER" });
    let none = json!({ "state": "pending", "total_count": 0 });
    let runs = |status: &str, conclusion: Value| json!({ "total_count": 1, "check_runs": [{ "name": "test", "status": status, "conclusion": conclusion }] });
    let cases: Vec<(Vec<Answer>, Option<&str>)> = vec![
        (vec![ok(REVIEWS, json!([]))], Some("0 of 1 approvals are there")),
        (vec![ok(REVIEWS, json!([review("rita", "APPROVED", "an-older-one")]))], Some("0 of 1 approvals are there")),
        (
            vec![ok(REVIEWS, json!([review("rita", "APPROVED", "aaaa"), review("bo", "CHANGES_REQUESTED", "aaaa")]))],
            Some("bo asked for changes"),
        ),
        (
            vec![
                ok(REVIEWS, json!([review("rita", "APPROVED", "aaaa")])),
                ok(STATUS, json!({ "state": "pending", "total_count": 1 })),
            ],
            Some("checks are running"),
        ),
        (
            vec![
                ok(REVIEWS, json!([review("rita", "APPROVED", "aaaa")])),
                ok(STATUS, none.clone()),
                ok(RUNS, runs("in_progress", Value::Null)),
            ],
            Some("check \"test\" is running"),
        ),
        (
            vec![
                ok(REVIEWS, json!([review("rita", "APPROVED", "aaaa")])),
                ok(STATUS, none.clone()),
                ok(RUNS, runs("completed", json!("failure"))),
            ],
            Some("check \"test\" says failure"),
        ),
        (
            vec![
                ok(REVIEWS, json!([review("bo", "CHANGES_REQUESTED", "aaaa"), review("bo", "APPROVED", "aaaa")])),
                ok(STATUS, none),
                ok(RUNS, runs("completed", json!("success"))),
            ],
            None,
        ),
    ];
    for (answers, expected) in cases {
        let (forge, _) = scripted(ForgeKind::Github, answers).await;
        let found = forge.readiness(&open(ForgeKind::Github), 1).await.unwrap();
        assert_eq!(found.err().as_deref(), expected);
    }

    const MERGE_REQUEST: &str = "GET /projects/group%2Fcluster/merge_requests/7";
    const APPROVALS: &str = "GET /projects/group%2Fcluster/merge_requests/7/approvals";
    let with = |status: &str, pipeline: &str| {
        let mut request = gitlab_request("opened");
        request["detailed_merge_status"] = status.into();
        request["head_pipeline"]["status"] = pipeline.into();
        request
    };
    let approved = json!({ "approved_by": [{ "user": { "username": "rita" } }] });
    let cases: Vec<(Vec<Answer>, Option<&str>)> = vec![
        (vec![ok(MERGE_REQUEST, with("not_approved", "success"))], Some("the forge says not approved")),
        (
            vec![ok(MERGE_REQUEST, with("mergeable", "success")), ok(APPROVALS, json!({ "approved_by": [] }))],
            Some("0 of 1 approvals are there"),
        ),
        (
            vec![ok(MERGE_REQUEST, with("mergeable", "running")), ok(APPROVALS, approved.clone())],
            Some("the pipeline is running"),
        ),
        (vec![ok(MERGE_REQUEST, with("mergeable", "success")), ok(APPROVALS, approved)], None),
    ];
    for (answers, expected) in cases {
        let (forge, _) = scripted(ForgeKind::Gitlab, answers).await;
        let found = forge.readiness(&open(ForgeKind::Gitlab), 1).await.unwrap();
        assert_eq!(found.err().as_deref(), expected);
    }
}

#[tokio::test]
async fn what_a_merge_meets_is_told_apart() {
    const PULL: &str = "PUT /repos/group/cluster/pulls/7/merge";
    const REQUEST: &str = "PUT /projects/group%2Fcluster/merge_requests/7/merge";
    let cases = [
        (405, json!({ "message": "Base branch was modified. Review and try the merge again." })),
        (409, json!({ "message": "Head branch was modified. Review and try the merge again." })),
    ];
    for (status, body) in cases {
        let (forge, script) =
            scripted(ForgeKind::Github, vec![refuses(PULL, status, body.clone()), ok(PULL, json!({ "merged": true }))])
                .await;
        let refused = forge.merge(&open(ForgeKind::Github), Some(MergeMethod::Squash)).await.unwrap_err();
        assert_eq!(refused, ForgeError::NotYet(body["message"].as_str().unwrap().to_owned()));
        forge.merge(&open(ForgeKind::Github), Some(MergeMethod::Squash)).await.unwrap();
        assert_eq!(calls(&script)[0].1, json!({ "sha": "aaaa", "merge_method": "squash" }));
    }
    let (forge, script) = scripted(
        ForgeKind::Gitlab,
        vec![
            refuses(REQUEST, 405, json!({ "message": "405 Method Not Allowed" })),
            ok(REQUEST, gitlab_request("merged")),
        ],
    )
    .await;
    let refused = forge.merge(&open(ForgeKind::Gitlab), None).await.unwrap_err();
    assert_eq!(refused, ForgeError::NotYet("405 Method Not Allowed".into()));
    forge.merge(&open(ForgeKind::Gitlab), Some(MergeMethod::Squash)).await.unwrap();
    assert_eq!(calls(&script)[1].1, json!({ "sha": "aaaa", "squash": true, "should_remove_source_branch": true }));
}

#[tokio::test]
async fn limits_are_kept_as_the_forge_asks() {
    const PULL: &str = "GET /repos/group/cluster/pulls/7";
    let limited = |status: u16, headers: Vec<(&'static str, String)>, message: &str| Answer {
        call: PULL,
        status,
        headers,
        body: json!({ "message": message }),
    };
    let cases = [
        (limited(429, vec![("retry-after", "17".into())], "slow down"), 17..=17),
        (limited(403, vec![("retry-after", "30".into())], "You have exceeded a secondary rate limit"), 30..=30),
        (limited(403, vec![], "You have exceeded a secondary rate limit"), 60..=60),
        (
            limited(
                403,
                vec![
                    ("x-ratelimit-remaining", "0".into()),
                    ("x-ratelimit-reset", "1796053800".into()),
                    ("date", "Mon, 30 Nov 2026 15:48:20 GMT".into()),
                ],
                "API rate limit exceeded",
            ),
            100..=100,
        ),
        (limited(429, vec![("retry-after", "999999".into())], "slow down"), 3600..=3600),
    ];
    for (answer, expected) in cases {
        let (forge, _) = scripted(ForgeKind::Github, vec![answer]).await;
        let ForgeError::Limited { wait, .. } = forge.get(7).await.unwrap_err() else { panic!("no limit") };
        assert!(expected.contains(&wait.as_secs()), "{wait:?}");
    }
    // A plain refusal is no limit, and a forge's own fault is not ours.
    let (forge, _) =
        scripted(ForgeKind::Github, vec![refuses(PULL, 403, json!({ "message": "Must have admin rights" }))]).await;
    let refused = forge.get(7).await.unwrap_err();
    assert_eq!(refused, ForgeError::Refused { status: 403, message: "Must have admin rights".into() });
    let (forge, _) = scripted(ForgeKind::Github, vec![refuses(PULL, 502, json!({ "message": "Bad gateway" }))]).await;
    assert!(matches!(forge.get(7).await.unwrap_err(), ForgeError::Unreachable(_)));
    let moved = Answer {
        call: PULL,
        status: 301,
        headers: vec![("location", "https://api.github.example/repositories/12/pulls/7".into())],
        body: json!({ "message": "Moved Permanently" }),
    };
    let (forge, _) = scripted(ForgeKind::Github, vec![moved]).await;
    let moved = forge.get(7).await.unwrap_err().to_string();
    assert!(moved.contains("somewhere else") && moved.contains("/repositories/12"), "{moved}");
    let unreachable =
        Connection::new("http://127.0.0.1:1", "o/r", ("authorization", "Bearer s3cret"), &Access::default());
    let said = forge_error(unreachable.unwrap()).await;
    assert!(!said.contains("s3cret") && said.contains("does not answer"), "{said}");
}

async fn forge_error(connection: Connection) -> String {
    forge(ForgeKind::Github, connection).get(7).await.unwrap_err().to_string()
}

#[tokio::test]
async fn outcomes_are_told_in_each_forges_words() {
    let status = |state| CommitStatus {
        state,
        context: "styrmin/c/e/front".into(),
        description: "x".repeat(300),
        url: "https://styrmin.example".into(),
    };
    let words = [
        (StatusState::Pending, "pending", "pending"),
        (StatusState::Success, "success", "success"),
        (StatusState::Failure, "failure", "failed"),
        (StatusState::Error, "error", "canceled"),
    ];
    for (state, github, gitlab) in words {
        let (forge, script) =
            scripted(ForgeKind::Github, vec![refuses("POST /repos/group/cluster/statuses/aaaa", 201, json!({}))]).await;
        forge.status("aaaa", &status(state)).await.unwrap();
        let said = calls(&script)[0].1.clone();
        assert_eq!((said["state"].as_str(), said["context"].as_str()), (Some(github), Some("styrmin/c/e/front")));
        assert_eq!(said["description"].as_str().unwrap().chars().count(), 140);
        let (forge, script) =
            scripted(ForgeKind::Gitlab, vec![refuses("POST /projects/group%2Fcluster/statuses/aaaa", 201, json!({}))])
                .await;
        forge.status("aaaa", &status(state)).await.unwrap();
        let said = calls(&script)[0].1.clone();
        assert_eq!((said["state"].as_str(), said["name"].as_str()), (Some(gitlab), Some("styrmin/c/e/front")));
    }
}

#[tokio::test]
async fn comments_are_read_from_where_they_were_left() {
    let github = json!([
        { "id": 1, "user": { "login": "rita" }, "body": "old" },
        { "id": 3, "user": { "login": "bo" }, "body": "newest" },
        { "id": 2, "user": { "login": "rita" }, "body": "new" }
    ]);
    let gitlab = json!([
        { "id": 3, "author": { "username": "bo" }, "body": "newest", "system": false },
        { "id": 2, "author": { "username": "rita" }, "body": "new", "system": false },
        { "id": 4, "author": { "username": "bo" }, "body": "approved this merge request", "system": true }
    ]);
    let all = [
        (ForgeKind::Github, ok("GET /repos/group/cluster/issues/7/comments?per_page=100&page=1", github)),
        (
            ForgeKind::Gitlab,
            ok(
                "GET /projects/group%2Fcluster/merge_requests/7/notes?sort=desc&order_by=created_at&per_page=100",
                gitlab,
            ),
        ),
    ];
    for (kind, answer) in all {
        let (forge, _) = scripted(kind, vec![answer]).await;
        let found = forge.comments(7, 1).await.unwrap();
        let found: Vec<(i64, &str, &str)> =
            found.iter().map(|comment| (comment.id, comment.author.as_str(), comment.text.as_str())).collect();
        assert_eq!(found, [(2, "rita", "new"), (3, "bo", "newest")]);
    }
}

//! Changes that people review as pull requests, on a real Gitea.

use serde_json::{Value, json};
use styrmin_tests::eventually;
use styrmin_tests::reviews::{LIMIT, Reviewed, Scene, quick};
use styrmin_tests::server::{Api as _, Server, ctl};

const REVIEW: &str = "PULL_REQUEST";

fn rules() -> Value {
    json!({ "mode": REVIEW })
}

fn variable(document: &Value, name: &str) -> Value {
    document["spec"]["context"]["instance"]["config"]["env_vars"][name].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_counts_when_its_request_is_merged_and_not_before() {
    let scene = Scene::start(rules()).await;
    let id = scene.direct("front").await;
    let (task, proposal) = scene.set(&id, "COLOR", "blue").await;
    let number = scene.number(&proposal).await;

    let seen = scene.task(&task).await;
    assert_eq!(seen["state"], "RUNNING");
    assert_eq!(seen["steps"][0]["name"], "Open the pull request");
    assert!(seen["steps"][0]["message"].as_str().unwrap().contains(&format!("#{number}")), "{seen}");
    assert_eq!(seen["steps"][1]["state"], "RUNNING");
    let before = scene.deployment(&id).await;
    assert_eq!(before["config"], json!({}), "what is in review does not count");
    assert_eq!(before["proposals"]["nodes"][0]["id"], proposal);
    assert_eq!(variable(&scene.document("main", &id).await.unwrap(), "COLOR"), Value::Null);

    let pull = &scene.forge.pulls().await[0];
    assert_eq!(pull["title"], "Update deployment front (web-application 1.27)");
    let body = pull["body"].as_str().unwrap();
    assert!(body.contains("| `config.env_vars.COLOR` |  | `blue` | deployment |"), "{body}");
    assert!(body.contains("restarts pods") && body.contains("HelmRelease"), "{body}");

    scene.forge.merge(number, "merge").await;
    let merged = scene.until_state(&proposal, "MERGED").await;
    assert_eq!(merged["items"][0]["state"], "MERGED");
    let after = scene.deployment(&id).await;
    assert_eq!(after["config"], json!({ "env_vars": { "COLOR": "blue" } }));
    assert_eq!(after["state"], "DEPLOYING");
    let document = scene.document("main", &id).await.unwrap();
    assert_eq!(variable(&document, "COLOR"), "blue");
    assert_eq!(
        document["spec"]["instanceId"], after["newestInstance"]["id"],
        "the instance that was reviewed is the one"
    );
    let seen = scene.task(&task).await;
    assert_eq!(seen["steps"][1]["state"], "SUCCEEDED", "{seen}");
    assert!(seen["steps"][1]["message"].as_str().unwrap().starts_with("Commit "), "{seen}");
    // Nothing of ours follows: what was merged is what is written.
    scene.server.drained(LIMIT).await;
    let tip = scene.forge.tip("main").await;
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    assert_eq!(scene.forge.tip("main").await, tip);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deployment_begins_and_ends_by_requests() {
    let scene = Scene::start(rules()).await;
    let create = "mutation($input: CreateDeploymentInput!) { createDeployment(input: $input) { deployment { id state } task { id } proposal { id } } }";
    let input = |name: &str| json!({ "environment": scene.environment, "name": name, "driver": "web-application", "applicationVersion": "1.27", "parameters": { "image": "nginx" } });
    let made = scene.client.ok(create, json!({ "input": input("front") })).await["createDeployment"].clone();
    let id = made["deployment"]["id"].as_str().unwrap().to_owned();
    let proposal = made["proposal"]["id"].as_str().unwrap().to_owned();
    let number = scene.number(&proposal).await;
    assert_eq!(scene.document("main", &id).await, None);
    // Its name is taken, and it cannot go out without its review.
    let again = scene.client.execute(create, json!({ "input": input("front") })).await.unwrap_err();
    assert!(again.to_string().contains("is taken"), "{again}");
    let stop = "mutation($id: ID!) { stopDeployment(id: $id, delivery: DIRECT) { task { id } } }";
    let refused = scene.client.execute(stop, json!({ "id": id })).await.unwrap_err();
    assert!(refused.to_string().contains("is only proposed so far"), "{refused}");

    scene.forge.merge(number, "squash").await;
    scene.until_state(&proposal, "MERGED").await;
    let document = scene.document("main", &id).await.unwrap();
    let found = scene.deployment(&id).await;
    assert_eq!(document["spec"]["instanceId"], found["newestInstance"]["id"]);

    // A second one is not wanted: it was never there.
    let made = scene.client.ok(create, json!({ "input": input("back") })).await["createDeployment"].clone();
    let (other, task) = (made["deployment"]["id"].clone(), made["task"]["id"].as_str().unwrap().to_owned());
    let proposal = made["proposal"]["id"].as_str().unwrap().to_owned();
    let number = scene.number(&proposal).await;
    scene.forge.as_rita("PATCH", &format!("/pulls/{number}"), &json!({ "state": "closed" })).await.unwrap();
    scene.until_state(&proposal, "CLOSED").await;
    let ended = scene.task(&task).await;
    assert_eq!(ended["state"], "REJECTED", "{ended}");
    assert!(ended["message"].as_str().unwrap().contains(&format!("#{number} was closed")), "{ended}");
    assert_eq!(scene.deployment(other.as_str().unwrap()).await["state"], "DELETED");

    // The end of the first one.
    let delete =
        "mutation($id: ID!) { deleteDeployment(id: $id) { deployment { state } task { id } proposal { id } } }";
    let asked = scene.client.ok(delete, json!({ "id": id })).await["deleteDeployment"].clone();
    assert_eq!(asked["deployment"]["state"], "DEPLOYING", "it runs on until the merge");
    let proposal = asked["proposal"]["id"].as_str().unwrap().to_owned();
    let number = scene.number(&proposal).await;
    let body = scene.forge.pulls().await.last().unwrap()["body"].as_str().unwrap().to_owned();
    assert!(body.contains("deletes data"), "{body}");
    scene.forge.merge(number, "rebase").await;
    scene.until_state(&proposal, "MERGED").await;
    let found = scene.deployment(&id).await;
    assert_eq!((&found["lifecycle"], &found["state"]), (&json!("DELETING"), &json!("DELETING")));
    assert_eq!(scene.document("main", &id).await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn styrmin_merges_when_checks_and_approvals_are_there() {
    let rules = json!({ "mode": REVIEW, "autoMerge": true, "mergeMethod": "SQUASH", "reviewers": ["rita", "nobody-knows"], "labels": ["styrmin", "missing"] });
    let scene = Scene::start(rules).await;
    scene.forge.api("POST", "/labels", &json!({ "name": "styrmin", "color": "#00aabb" })).await;
    let id = scene.direct("front").await;
    let (task, proposal) = scene.set(&id, "COLOR", "blue").await;
    let number = scene.number(&proposal).await;
    let pull = scene.forge.api("GET", &format!("/pulls/{number}"), &json!(null)).await;
    assert_eq!(pull["labels"][0]["name"], "styrmin");
    assert_eq!(pull["requested_reviewers"][0]["login"], "rita");
    let says =
        |text: &'static str| move |found: &Value| found["message"].as_str().is_some_and(|said| said.contains(text));
    scene.until("it waits for an approval", &proposal, says("0 of 1 approvals")).await;
    let seen = scene.task(&task).await;
    assert!(seen["steps"][1]["message"].as_str().unwrap().contains("0 of 1 approvals"), "{seen}");

    // A check that runs, then fails, then passes.
    let head = pull["head"]["sha"].as_str().unwrap().to_owned();
    let check = async |state: &str| {
        let body = json!({ "state": state, "context": "ci/test", "description": "tests" });
        scene.forge.as_rita("POST", &format!("/statuses/{head}"), &body).await.unwrap();
    };
    check("pending").await;
    scene.forge.approve(number).await;
    scene.until("it waits for a check", &proposal, says("checks are running")).await;
    check("failure").await;
    scene.until("a check fails", &proposal, says("checks say failure")).await;
    // Somebody wants something else.
    let body = json!({ "event": "REQUEST_CHANGES", "body": "no" });
    scene.forge.as_rita("POST", &format!("/pulls/{number}/reviews"), &body).await.unwrap();
    scene.until("a reviewer is against it", &proposal, says("rita asked for changes")).await;
    scene.forge.approve(number).await;
    check("success").await;
    scene.until_state(&proposal, "MERGED").await;
    assert_eq!(variable(&scene.document("main", &id).await.unwrap(), "COLOR"), "blue");
    assert_eq!(scene.deployment(&id).await["config"], json!({ "env_vars": { "COLOR": "blue" } }));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_change_joins_the_open_request() {
    let scene = Scene::start(rules()).await;
    let id = scene.direct("front").await;
    let (first, proposal) = scene.set(&id, "COLOR", "blue").await;
    let number = scene.number(&proposal).await;
    let described =
        |text: &'static str| move |found: &Value| found["body"].as_str().is_some_and(|body| body.contains(text));
    scene.forge.pull("the first is described", number, described("`blue`")).await;
    let (second, same) = scene.set(&id, "SIZE", "large").await;
    assert_eq!(same, proposal);
    scene.until_task("the older one is superseded", &first, |task| task["state"] == "SUPERSEDED").await;
    let pull = scene.forge.pull("the description follows", number, described("`large`")).await;
    assert!(pull["body"].as_str().unwrap().contains("`blue`"), "{pull}");
    // What is asked twice is asked once.
    let query = "mutation($id: ID!, $input: UpdateDeploymentInput!) { updateDeployment(id: $id, input: $input) { task { id } proposal { id } } }";
    let input = json!({ "config": { "set": { "env_vars": { "SIZE": "large" } } } });
    let again = scene.client.ok(query, json!({ "id": id, "input": input })).await["updateDeployment"].clone();
    assert_eq!((again["task"].clone(), again["proposal"]["id"].clone()), (Value::Null, json!(proposal)));
    scene.forge.merge(number, "merge").await;
    scene.until_state(&proposal, "MERGED").await;
    let config = json!({ "env_vars": { "COLOR": "blue", "SIZE": "large" } });
    assert_eq!(scene.deployment(&id).await["config"], config);
    scene.until_task("the second goes on", &second, |task| task["steps"][1]["state"] == "SUCCEEDED").await;
    assert_eq!(scene.forge.pulls().await.len(), 1);

    // Back to what is merged: nothing is left to review.
    let (_, proposal) = scene.set(&id, "SIZE", "small").await;
    let number = scene.number(&proposal).await;
    let query = "mutation($id: ID!, $input: UpdateDeploymentInput!) { updateDeployment(id: $id, input: $input) { task { id } } }";
    scene.client.ok(query, json!({ "id": id, "input": input })).await;
    scene.until_state(&proposal, "CLOSED").await;
    scene.forge.pull("the request is closed", number, |pull| pull["state"] == "closed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_people_commit_to_the_branch_is_what_comes_to_run() {
    let scene = Scene::start(rules()).await;
    let id = scene.direct("front").await;
    let (_, proposal) = scene.set(&id, "COLOR", "blue").await;
    let number = scene.number(&proposal).await;
    let branch = scene.proposal(&proposal).await["headBranch"].as_str().unwrap().to_owned();
    let before = scene.forge.tip(&branch).await;

    // Rita would rather have green, and names what no configuration can say.
    let rita = scene.forge.clone_of(&branch).await;
    let path = rita.path(&id);
    let text = std::fs::read_to_string(rita.work().join(&path)).unwrap();
    let edited = text.replace("COLOR: \"blue\"", "COLOR: \"green\"").replace("COLOR: blue", "COLOR: green");
    assert_ne!(edited, text, "{text}");
    let edited = edited.replacen("labels:", "labels:\n    team: red", 1);
    std::fs::write(rita.work().join(&path), edited).unwrap();
    rita.git(&["commit", "--quiet", "-am", "Rather green"]).await;
    let hers = rita.git(&["rev-parse", "HEAD"]).await.trim().to_owned();
    rita.git(&["push", "--quiet", "origin", &branch]).await;

    let green = |found: &Value| found["body"].as_str().is_some_and(|body| body.contains("`green`"));
    scene.forge.pull("the description says green", number, green).await;
    let tip = scene.forge.tip(&branch).await;
    let rita = scene.forge.clone_of(&branch).await;
    assert!(rita.git(&["log", "--format=%H", &tip]).await.contains(&hers), "her commit stays");
    assert!(rita.git(&["log", "--format=%H", &tip]).await.contains(&before));
    assert!(rita.git(&["log", "-1", "--format=%an", &tip]).await.contains("Pat"), "the instance is hers");
    let comments = scene.forge.api("GET", &format!("/issues/{number}/comments"), &json!(null)).await;
    assert!(comments.to_string().contains("metadata (it follows from the deployment)"), "{comments}");
    scene.forge.merge(number, "squash").await;
    scene.until_state(&proposal, "MERGED").await;
    assert_eq!(scene.deployment(&id).await["config"], json!({ "env_vars": { "COLOR": "green" } }));

    // The same in the moment of the merge: what was merged counts.
    let (task, proposal) = scene.set(&id, "COLOR", "red").await;
    let number = scene.number(&proposal).await;
    scene
        .client
        .ok(
            "mutation($id: ID!) { updateCluster(id: $id, edits: { policy: ADOPT }) { cluster { id } } }",
            json!({ "id": scene.cluster }),
        )
        .await;
    let branch = scene.proposal(&proposal).await["headBranch"].as_str().unwrap().to_owned();
    let rita = scene.forge.clone_of("main").await;
    rita.git(&["merge", "--quiet", "--squash", &format!("origin/{branch}")]).await;
    let path = rita.path(&id);
    let text = std::fs::read_to_string(rita.work().join(&path)).unwrap();
    std::fs::write(rita.work().join(&path), text.replace("red", "yellow")).unwrap();
    rita.git(&["commit", "--quiet", "-am", "Rather yellow"]).await;
    rita.git(&["push", "--quiet", "origin", "main"]).await;
    scene.until_state(&proposal, "MERGED").await;
    let yellow = json!({ "env_vars": { "COLOR": "yellow" } });
    assert_eq!(scene.deployment(&id).await["config"], yellow);
    scene.until_task("what was reviewed is superseded", &task, |task| task["state"] == "SUPERSEDED").await;
    scene.server.drained(LIMIT).await;
    let document = scene.document("main", &id).await.unwrap();
    assert_eq!(variable(&document, "COLOR"), "yellow");
    assert_eq!(document["spec"]["instanceId"], scene.deployment(&id).await["newestInstance"]["id"]);
    scene.forge.pull("the request is closed", number, |pull| pull["state"] == "closed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_direct_stop_goes_out_without_what_is_in_review() {
    let scene = Scene::start(rules()).await;
    let id = scene.direct("front").await;
    let (first, proposal) = scene.set(&id, "COLOR", "blue").await;
    let number = scene.number(&proposal).await;
    let branch = scene.proposal(&proposal).await["headBranch"].as_str().unwrap().to_owned();
    let stop = "mutation($id: ID!) { stopDeployment(id: $id, delivery: DIRECT) { task { id } proposal { id } } }";
    let stopped = scene.client.ok(stop, json!({ "id": id })).await["stopDeployment"].clone();
    assert_eq!(stopped["proposal"], Value::Null);
    scene.server.drained(LIMIT).await;
    let document = scene.document("main", &id).await.unwrap();
    assert_eq!(document["spec"]["lifecycle"], "stopped");
    assert_eq!(variable(&document, "COLOR"), Value::Null);

    // The proposal is built anew on it, by other instances, and can be merged.
    scene.until_task("its instance is another one", &first, |task| task["state"] == "SUPERSEDED").await;
    eventually("its branch is on the new base", LIMIT, async || {
        let document = scene.document(&branch, &id).await;
        match document {
            Some(found) if found["spec"]["lifecycle"] == "stopped" && variable(&found, "COLOR") == "blue" => Ok(()),
            found => Err(found),
        }
    })
    .await;
    scene.forge.merge(number, "merge").await;
    scene.until_state(&proposal, "MERGED").await;
    let found = scene.deployment(&id).await;
    assert_eq!(
        (&found["lifecycle"], &found["config"]),
        (&json!("STOPPED"), &json!({ "env_vars": { "COLOR": "blue" } }))
    );
    let document = scene.document("main", &id).await.unwrap();
    assert_eq!(
        (document["spec"]["lifecycle"].clone(), variable(&document, "COLOR")),
        (json!("stopped"), json!("blue"))
    );
    assert_eq!(scene.forge.pulls().await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_base_that_moves_elsewhere_leaves_the_branch_alone() {
    let scene = Scene::start(rules()).await;
    let (id, other) = (scene.direct("front").await, scene.direct("back").await);
    let (_, proposal) = scene.set(&id, "COLOR", "blue").await;
    let number = scene.number(&proposal).await;
    let head = scene.proposal(&proposal).await["head"].clone();
    let direct = "mutation($id: ID!, $input: UpdateDeploymentInput!) { updateDeployment(id: $id, input: $input, delivery: DIRECT) { task { id } } }";
    let input = json!({ "config": { "set": { "env_vars": { "A": "1" } } } });
    scene.client.ok(direct, json!({ "id": other, "input": input })).await;
    scene.server.drained(LIMIT).await;
    // Rita has the forge bring the branch up to date: that is nobody's change of anything.
    eventually("the forge updates the branch", LIMIT, async || {
        scene.forge.as_rita("POST", &format!("/pulls/{number}/update"), &json!({})).await
    })
    .await;
    let moved = scene.until("its head is the merge", &proposal, |found| found["head"] != head).await;
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    let branch = moved["headBranch"].as_str().unwrap();
    assert_eq!(scene.forge.tip(branch).await, moved["head"].as_str().unwrap(), "nothing of ours follows");
    assert_eq!(moved["items"][0]["state"], "OPEN");
    scene.forge.merge(number, "merge").await;
    scene.until_state(&proposal, "MERGED").await;
    assert_eq!(scene.deployment(&id).await["config"], json!({ "env_vars": { "COLOR": "blue" } }));
    assert_eq!(scene.deployment(&other).await["config"], json!({ "env_vars": { "A": "1" } }));
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_deployments_are_one_request_that_says_what_overrides_it() {
    let scene = Scene::start(rules()).await;
    let mut ids = Vec::new();
    for index in 0..31 {
        ids.push(scene.direct(&format!("web-{index:02}")).await);
    }
    let keeps = "mutation($id: ID!, $input: UpdateDeploymentInput!) { updateDeployment(id: $id, input: $input, delivery: DIRECT) { task { id } } }";
    let input = json!({ "config": { "set": { "env_vars": { "COLOR": "own" } } } });
    scene.client.ok(keeps, json!({ "id": ids[30], "input": input })).await;
    scene.server.drained(LIMIT).await;

    let update = "mutation($id: ID!, $config: ConfigPatch!) { updateEnvironment(id: $id, config: $config) { environment { config } fanOut { id proposal { id } } } }";
    let config = json!({ "set": { "env_vars": { "COLOR": "blue" } } });
    let asked =
        scene.client.ok(update, json!({ "id": scene.environment, "config": config })).await["updateEnvironment"]
            .clone();
    assert_eq!(asked["environment"]["config"], json!({}), "what is in review does not count");
    let proposal = asked["fanOut"]["proposal"]["id"].as_str().unwrap().to_owned();
    let number = scene.number(&proposal).await;
    let pull = scene.forge.api("GET", &format!("/pulls/{number}"), &json!(null)).await;
    assert_eq!(pull["title"], "Change the configuration of environment e (30 deployments)");
    let body = pull["body"].as_str().unwrap();
    assert!(body.contains("- `env_vars.COLOR: blue`"), "{body}");
    assert!((0..30).all(|index| body.contains(&format!("[web-{index:02}]"))), "{body}");
    assert!(body.contains("`e/web-30 keeps env_vars.COLOR: \"own\" (set on the deployment)`"), "{body}");
    let branch = scene.proposal(&proposal).await["headBranch"].as_str().unwrap().to_owned();
    let rita = scene.forge.clone_of(&branch).await;
    assert_eq!(rita.git(&["rev-list", "--count", "origin/main..HEAD"]).await.trim(), "1", "one commit");

    // Somebody takes one of them out of it.
    let left_out = &ids[7];
    let path = rita.path(left_out);
    rita.git(&["checkout", "--quiet", "origin/main", "--", &path]).await;
    rita.git(&["commit", "--quiet", "-m", "Not this one"]).await;
    rita.git(&["push", "--quiet", "origin", &branch]).await;
    let keeps_it = |found: &Value| found["body"].as_str().is_some_and(|body| !body.contains("[web-07]"));
    scene.forge.pull("it is not in the request any more", number, keeps_it).await;
    scene.forge.merge(number, "squash").await;
    scene.until_state(&proposal, "MERGED").await;
    let environment = "query($id: ID!) { environment(id: $id) { config } }";
    let found = scene.client.ok(environment, json!({ "id": scene.environment })).await;
    assert_eq!(found["environment"]["config"], json!({ "env_vars": { "COLOR": "blue" } }));
    scene.server.drained(LIMIT).await;
    let files = scene.forge.files("main").await;
    let colors = files
        .iter()
        .filter(|(path, text)| {
            let is_blue = text.contains("COLOR: \"blue\"") || text.contains("COLOR: blue");
            path.ends_with("styrmindeployment.yaml") && is_blue
        })
        .count();
    assert_eq!(colors, 29);
    assert_eq!(scene.forge.pulls().await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_asked_after_the_branch_was_made_stays_in_review_when_that_is_merged() {
    // Nothing is pushed by itself: what is asked meanwhile does not reach the branch.
    let forge = Reviewed::start().await;
    let mut server = Server::new(None);
    quick(&mut server);
    let git = forge.git();
    let mut scene = Scene::on(forge, server, git, rules()).await;
    let (id, other) = (scene.direct("front").await, scene.direct("back").await);
    let (first, proposal) = scene.set(&id, "COLOR", "blue").await;
    let number = scene.number(&proposal).await;
    let update = "mutation($id: ID!, $config: ConfigPatch!) { updateEnvironment(id: $id, config: $config) { fanOut { proposal { id } } } }";
    let level = async |scene: &Scene, name: &str| {
        let config = json!({ "set": { "env_vars": { name: "1" } } });
        let asked = scene.client.ok(update, json!({ "id": scene.environment, "config": config })).await;
        asked["updateEnvironment"]["fanOut"]["proposal"]["id"].as_str().unwrap().to_owned()
    };
    let whole = level(&scene, "FIRST").await;
    let whole_number = scene.number(&whole).await;
    scene.server.kill().await;
    // A token that opens nothing: the forge and its repository are out of reach, and people go on.
    scene.server.set("STYRMIN_FORGE_POLL", Some("3600"));
    scene.server.set("STYRMIN_GIT_POLL", Some("3600"));
    scene.server.up().await;
    let git = "mutation($id: ID!, $git: GitAccessInput!) { updateCluster(id: $id, git: $git) { cluster { id } } }";
    scene.client.ok(git, json!({ "id": scene.cluster, "git": { "username": "styrmin", "password": "wrong" } })).await;
    let (second, same) = scene.set(&id, "SIZE", "large").await;
    assert_eq!(same, proposal);
    assert_eq!(level(&scene, "SECOND").await, whole);
    scene.forge.merge(number, "squash").await;
    // The second one conflicts with the first: a person merges what it had.
    let person = scene.forge.clone_of("main").await;
    let branch = scene.proposal(&whole).await["headBranch"].as_str().unwrap().to_owned();
    person.git(&["checkout", "--quiet", &format!("origin/{branch}"), "--", &person.path(&other)]).await;
    person.git(&["commit", "--quiet", "-m", "What was reviewed of the environment"]).await;
    person.git(&["push", "--quiet", "origin", "main"]).await;
    scene.server.kill().await;
    quick(&mut scene.server);
    scene.server.up().await;
    let right = json!({ "username": "styrmin", "password": scene.forge.gitea.token() });
    scene.client.ok(git, json!({ "id": scene.cluster, "git": right })).await;

    // Blue counts, large does not, and is reviewed in a request of its own.
    let blue = json!({ "env_vars": { "COLOR": "blue" } });
    eventually("what was merged counts", LIMIT, async || {
        let found = scene.deployment(&id).await;
        if found["config"] == blue { Ok(()) } else { Err(found) }
    })
    .await;
    let next = |found: &Value| found["number"].as_i64().is_some_and(|next| next != number);
    let number = scene.until("another request is open", &proposal, next).await["number"].as_i64().unwrap();
    let pull = scene.forge.api("GET", &format!("/pulls/{number}"), &json!(null)).await;
    let body = pull["body"].as_str().unwrap();
    assert!(body.contains("`large`") && !body.contains("`blue`"), "{body}");
    assert_eq!(scene.deployment(&id).await["config"], blue);
    scene.forge.merge(number, "merge").await;
    scene.until_state(&proposal, "MERGED").await;
    let both = json!({ "env_vars": { "COLOR": "blue", "SIZE": "large" } });
    assert_eq!(scene.deployment(&id).await["config"], both);
    for task in [&first, &second] {
        scene.until_task("it is no more in review", task, |task| task["steps"][1]["state"] != "RUNNING").await;
    }

    // The same for a whole environment: what was merged of it counts, and what was asked since is another request.
    scene.until_state(&whole, "MERGED").await;
    scene.forge.pull("the first request is closed", whole_number, |pull| pull["state"] == "closed").await;
    let environment = "query($id: ID!) { environment(id: $id) { config } }";
    let config = async || {
        scene.client.ok(environment, json!({ "id": scene.environment })).await["environment"]["config"].clone()
    };
    assert_eq!(config().await, json!({ "env_vars": { "FIRST": "1" } }));
    let open = "{ proposals(open: true) { nodes { id title } } }";
    let open = scene.client.ok(open, json!({})).await["proposals"]["nodes"].as_array().cloned().unwrap();
    assert_eq!(open.len(), 1, "{open:?}");
    let rest = open[0]["id"].as_str().unwrap();
    let number = scene.number(rest).await;
    let pull = scene.forge.api("GET", &format!("/pulls/{number}"), &json!(null)).await;
    let body = pull["body"].as_str().unwrap();
    assert!(body.contains("env_vars.SECOND: 1") && !body.contains("env_vars.FIRST: 1"), "{body}");
    scene.forge.merge(number, "squash").await;
    scene.until_state(rest, "MERGED").await;
    assert_eq!(config().await, json!({ "env_vars": { "FIRST": "1", "SECOND": "1" } }));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_direct_end_takes_what_is_in_review_with_it() {
    let scene = Scene::start(rules()).await;
    let id = scene.direct("front").await;
    let (task, proposal) = scene.set(&id, "COLOR", "blue").await;
    let number = scene.number(&proposal).await;
    let delete = "mutation($id: ID!) { deleteDeployment(id: $id, delivery: DIRECT) { task { id } } }";
    scene.client.ok(delete, json!({ "id": id })).await;
    scene.until_state(&proposal, "CLOSED").await;
    let ended = scene.task(&task).await;
    assert_eq!(ended["state"], "REJECTED", "{ended}");
    scene.server.drained(LIMIT).await;
    assert_eq!(scene.document("main", &id).await, None);
    scene.forge.pull("the request is closed", number, |pull| pull["state"] == "closed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_for_another_branch_counts_when_it_comes_to_the_one_that_flux_follows() {
    let scene = Scene::start(json!({ "mode": REVIEW, "targetBranch": "staging" })).await;
    let id = scene.direct("front").await;
    scene.forge.api("POST", "/branches", &json!({ "new_branch_name": "staging", "old_branch_name": "main" })).await;
    let (task, proposal) = scene.set(&id, "COLOR", "blue").await;
    let number = scene.number(&proposal).await;
    scene.forge.merge(number, "merge").await;
    let says =
        |found: &Value| found["message"].as_str().is_some_and(|said| said.contains("counts when it comes to main"));
    scene.until("it says where it is", &proposal, says).await;
    assert_eq!(scene.deployment(&id).await["config"], json!({}));
    let person = scene.forge.clone_of("main").await;
    person.git(&["merge", "--quiet", "--no-ff", "-m", "Promote", "origin/staging"]).await;
    person.git(&["push", "--quiet", "origin", "main"]).await;
    scene.until_state(&proposal, "MERGED").await;
    assert_eq!(scene.deployment(&id).await["config"], json!({ "env_vars": { "COLOR": "blue" } }));
    scene.until_task("its task goes on", &task, |task| task["steps"][1]["state"] == "SUCCEEDED").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_shows_in_no_request_and_in_no_row_in_clear() {
    let forge = Reviewed::start().await;
    let git = forge.git();
    let mut server = Server::new(None);
    quick(&mut server);
    let scene = Scene::on(forge, server, git, rules()).await;
    let key = "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p";
    let recipients =
        "mutation($id: ID!, $key: String!) { updateCluster(id: $id, ageRecipient: $key) { cluster { id } } }";
    scene.client.ok(recipients, json!({ "id": scene.cluster, "key": key })).await;
    let secret = "correct-horse-battery";
    let create = "mutation($input: CreateDeploymentInput!) { createDeployment(input: $input) { deployment { id } proposal { id } } }";
    let input = json!({ "environment": scene.environment, "name": "db", "driver": "postgresql", "parameters": { "password": secret } });
    let made = scene.client.ok(create, json!({ "input": input })).await["createDeployment"].clone();
    let proposal = made["proposal"]["id"].as_str().unwrap();
    let number = scene.number(proposal).await;
    let pull = scene.forge.api("GET", &format!("/pulls/{number}"), &json!(null)).await.to_string();
    assert!(pull.contains("another secret") && !pull.contains(secret), "{pull}");
    let branch = scene.proposal(proposal).await["headBranch"].as_str().unwrap().to_owned();
    let files = scene.forge.files(&branch).await;
    assert!(files.keys().any(|path| path.ends_with("secrets.sops.yaml")));
    assert!(files.values().all(|text| !text.contains(secret)));
    scene.forge.merge(number, "squash").await;
    scene.until_state(proposal, "MERGED").await;
    let data = scene.server.folder.path().join("data");
    for file in ["styrmin.db", "styrmin.db-wal"] {
        let bytes = std::fs::read(data.join(file)).unwrap_or_default();
        assert!(!bytes.windows(secret.len()).any(|part| part == secret.as_bytes()), "{file}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_shows_and_closes_what_is_in_review() {
    let server = Server::start().await;
    let client = server.client();
    let (done, made, said) =
        ctl(&server, &["-o", "json", "clusters", "create", "c", "--mode", "pull-request", "--reviewer", "rita"]).await;
    assert!(done, "{said}");
    let made: Value = serde_json::from_str(&made).unwrap();
    let cluster = made["cluster"]["id"].as_str().unwrap().to_owned();
    let environment = client.environment(&cluster, "e").await;
    let create = [
        "-o",
        "json",
        "deployments",
        "create",
        "web-application",
        "1.27",
        &environment,
        "front",
        "--set",
        "image=nginx",
    ];
    let (done, made, said) = ctl(&server, &[&create[..], &["--delivery", "direct"]].concat()).await;
    assert!(done, "{said}");
    let made: Value = serde_json::from_str(&made).unwrap();
    assert_eq!(made["proposal"], Value::Null);
    let id = made["deployment"]["id"].as_str().unwrap();
    let update = ["-o", "json", "deployments", "update", id, "--config", "{env_vars: {COLOR: blue}}"];
    let (done, made, said) = ctl(&server, &update).await;
    assert!(done, "{said}");
    let made: Value = serde_json::from_str(&made).unwrap();
    let (task, proposal) = (made["task"]["id"].as_str().unwrap(), made["proposal"]["id"].as_str().unwrap());
    let (done, listed, _) = ctl(&server, &["proposals", "list", "--open"]).await;
    assert!(done && listed.contains("Update deployment front"), "{listed}");
    let (done, shown, _) = ctl(&server, &["proposals", "get", proposal]).await;
    assert!(done && shown.contains("`config.env_vars.COLOR`"), "{shown}");
    let whole = styrmin_tests::http().get(format!("{}/proposals/{proposal}", server.address()));
    let whole = whole.bearer_auth(server.token()).send().await.unwrap().text().await.unwrap();
    assert!(whole.starts_with("# Update deployment front") && whole.contains("HelmRelease"), "{whole}");
    let nobody = styrmin_tests::http().get(format!("{}/proposals/{proposal}", server.address())).send().await.unwrap();
    assert_eq!(nobody.status().as_u16(), 401);
    let (done, _, said) = ctl(&server, &["proposals", "close", proposal]).await;
    assert!(done, "{said}");
    let (done, _, said) = ctl(&server, &["tasks", "wait", task, "--for", "pushed", "--timeout", "20"]).await;
    assert!(!done && said.contains("was not merged: Ann Example closed it"), "{said}");
    // An environment may say something else than its cluster.
    let (done, _, said) = ctl(&server, &["environments", "update", &environment, "--mode", "direct"]).await;
    assert!(done, "{said}");
    let (done, made, said) = ctl(&server, &update).await;
    assert!(done, "{said}");
    assert!(!made.contains("headBranch"), "{made}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_is_merged_when_somebody_says_that_it_is_ready() {
    let rules = json!({ "mode": REVIEW, "draft": true, "autoMerge": true, "approvals": 0, "mergeMethod": "REBASE" });
    let scene = Scene::start(rules).await;
    let id = scene.direct("front").await;
    let (_, proposal) = scene.set(&id, "COLOR", "blue").await;
    let number = scene.number(&proposal).await;
    let says = |found: &Value| found["message"].as_str().is_some_and(|said| said.contains("it is a draft"));
    scene.until("it waits", &proposal, says).await;
    let pull = scene.forge.api("GET", &format!("/pulls/{number}"), &json!(null)).await;
    assert_eq!(pull["draft"], true);
    let title = pull["title"].as_str().unwrap().trim_start_matches("WIP: ").to_owned();
    scene.forge.api("PATCH", &format!("/pulls/{number}"), &json!({ "title": title })).await;
    scene.until_state(&proposal, "MERGED").await;
    assert_eq!(scene.deployment(&id).await["config"], json!({ "env_vars": { "COLOR": "blue" } }));
    let rita = scene.forge.clone_of("main").await;
    let merges = rita.git(&["rev-list", "--merges", "--count", "main"]).await;
    assert_eq!(merges.trim(), "0", "rebased");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_branch_held_before_is_known_when_somebody_goes_back_to_it_or_merges_it() {
    let scene = Scene::start(rules()).await;
    let id = scene.direct("front").await;
    let (_, proposal) = scene.set(&id, "COLOR", "blue").await;
    let number = scene.number(&proposal).await;
    let first = scene.proposal(&proposal).await["head"].as_str().unwrap().to_owned();
    scene.set(&id, "SIZE", "large").await;
    let moved = |found: &Value| found["head"].as_str().is_some_and(|head| head != first);
    scene.until("the second wish is on the branch", &proposal, moved).await;
    let branch = scene.proposal(&proposal).await["headBranch"].as_str().unwrap().to_owned();

    // Somebody takes the second wish back on the branch: so it is not asked for any more.
    let person = scene.forge.clone_of(&branch).await;
    person.git(&["revert", "--no-edit", "HEAD"]).await;
    person.git(&["push", "--quiet", "origin", &branch]).await;
    let is_small = |pull: &Value| {
        let body = pull["body"].as_str().unwrap_or_default();
        body.contains("`blue`") && !body.contains("`large`")
    };
    scene.forge.pull("the description follows", number, is_small).await;

    // And somebody brings the very first commit to the branch that Flux follows, from a clone of then.
    scene.set(&id, "SHAPE", "round").await;
    let round = |pull: &Value| pull["body"].as_str().is_some_and(|body| body.contains("`round`"));
    scene.forge.pull("a third wish is on the branch", number, round).await;
    person.git(&["checkout", "--quiet", "main"]).await;
    person.git(&["merge", "--quiet", "--no-ff", "-m", "What was reviewed first", &first]).await;
    person.git(&["push", "--quiet", "origin", "main"]).await;
    let blue = json!({ "env_vars": { "COLOR": "blue" } });
    eventually("blue counts", LIMIT, async || {
        let found = scene.deployment(&id).await;
        if found["config"] == blue { Ok(()) } else { Err(found) }
    })
    .await;
    let next = |found: &Value| found["number"].as_i64().is_some_and(|next| next != number);
    let next = scene.until("the rest goes on in another request", &proposal, next).await["number"].as_i64().unwrap();
    let body = scene.forge.api("GET", &format!("/pulls/{next}"), &json!(null)).await["body"].clone();
    let body = body.as_str().unwrap();
    assert!(body.contains("`round`") && !body.contains("`blue`"), "{body}");
    scene.forge.pull("the first request is closed", number, |pull| pull["state"] == "closed").await;
    scene.forge.merge(next, "squash").await;
    scene.until_state(&proposal, "MERGED").await;
    let config = scene.deployment(&id).await["config"].clone();
    assert_eq!((&config["env_vars"]["COLOR"], &config["env_vars"]["SHAPE"]), (&json!("blue"), &json!("round")));
    assert_eq!(variable(&scene.document("main", &id).await.unwrap(), "SIZE"), Value::Null);
}

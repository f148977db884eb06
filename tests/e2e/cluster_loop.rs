//! The whole loop on real parts: from a mutation to ready pods and back, and everything that can get in
//! its way.

use serde_json::{Value, json};
use std::io::Write as _;
use std::time::Duration;
use styrmin_renderer::layout::MANAGED_BY;
use styrmin_renderer::objects::CHART_SOURCE;
use styrmin_tests::people::Person;
use styrmin_tests::plane::{KWOK, condition};
use styrmin_tests::server::Api as _;
use styrmin_tests::world::{LIMIT, World, driver_like};
use styrmin_tests::{eventually, git};

const HELM: &str = "helm.toolkit.fluxcd.io/v2";

fn step<'a>(task: &'a Value, name: &str) -> &'a Value {
    let steps = task["steps"].as_array().unwrap();
    steps.iter().find(|step| step["name"] == name).unwrap_or_else(|| panic!("no step {name}: {task}"))
}

fn succeeded(task: &Value) {
    assert_eq!(task["state"], "SUCCEEDED", "{task:#}");
    for step in task["steps"].as_array().unwrap() {
        assert_eq!(step["state"], "SUCCEEDED", "{task:#}");
        assert!(step["startedAt"].is_string() && step["endedAt"].is_string(), "{task:#}");
    }
}

/// A file of the repository, by the end of its path.
async fn file(world: &World, deployment: &str) -> Option<String> {
    let end = format!("{deployment}/styrmindeployment.yaml");
    git::files(&world.repository()).await.into_iter().find_map(|(path, text)| path.ends_with(&end).then_some(text))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deployment_is_created_changed_upgraded_and_deleted() {
    let world = World::start().await;
    let client = world.client();
    let (stays, other_task) = client.web(&world.environment, "stays").await;
    let (id, task) = client.web(&world.environment, "front").await;
    succeeded(&world.until_ended(&other_task).await);
    let created = world.until_ended(&task).await;
    succeeded(&created);
    assert!(step(&created, "Install or upgrade the HelmRelease")["endedAt"].is_string());
    let running = world.until_state(&id, "RUNNING").await;
    assert_eq!(running["activeInstance"], running["newestInstance"]);
    assert!(
        running["pods"]["nodes"]
            .as_array()
            .is_some_and(|pods| !pods.is_empty() && pods.iter().all(|pod| pod["ready"] == true)),
        "{running:#}"
    );
    let (namespace, name) = world.object(&id);

    // An update reaches the application.
    let task = client.set_variable(&id, "GREETING", "hello").await.unwrap().unwrap();
    succeeded(&world.until_ended(&task).await);
    world.until_state(&id, "RUNNING").await;
    let pods = world.plane.kubectl(&["-n", &name, "get", "deployments,configmaps", "-o", "json"]).await;
    assert!(pods.contains("GREETING") && pods.contains("hello"), "{pods}");

    // An upgrade.
    let query = "mutation($id: ID!) { upgradeDeployment(id: $id, applicationVersion: \"1.28\") { task { id } } }";
    let task =
        client.ok(query, json!({ "id": id })).await["upgradeDeployment"]["task"]["id"].as_str().unwrap().to_owned();
    succeeded(&world.until_ended(&task).await);
    let deployments = world.plane.kubectl(&["-n", &name, "get", "deployments", "-o", "jsonpath={..image}"]).await;
    assert!(deployments.contains("nginx:1.28"), "{deployments}");
    let revisions = world.plane.kubectl(&["-n", &namespace, "get", "controllerrevisions", "-o", "json"]).await;
    let revisions: Value = serde_json::from_str(&revisions).unwrap();
    let of_it = revisions["items"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|one| one["metadata"]["name"].as_str().unwrap().starts_with(&name));
    assert_eq!(of_it.count(), 1, "only what was applied last is kept");

    // And the end.
    let task = client.delete(&id).await.unwrap().unwrap();
    let deleted = world.until_ended(&task).await;
    succeeded(&deleted);
    world.until_state(&id, "DELETED").await;
    assert!(file(&world, &id).await.is_none());
    // All of it can be read afterwards.
    let query = "query($id: ID!) { deployment(id: $id) { timeline(first: 100) { nodes { kind title task { id } } } } }";
    let timeline = client.ok(query, json!({ "id": id })).await["deployment"]["timeline"]["nodes"].clone();
    let told: Vec<(&str, &str)> = timeline
        .as_array()
        .unwrap()
        .iter()
        .rev()
        .map(|entry| (entry["kind"].as_str().unwrap(), entry["title"].as_str().unwrap()))
        .collect();
    let mut rest = told.as_slice();
    for wanted in [
        ("ASKED", "create"),
        ("COMMITTED", ""),
        ("PHASE", "Ready"),
        ("ENDED", "succeeded"),
        ("ASKED", "update"),
        ("COMMITTED", ""),
        ("ENDED", "succeeded"),
        ("ASKED", "upgrade"),
        ("ENDED", "succeeded"),
        ("ASKED", "delete"),
        ("COMMITTED", ""),
        ("ENDED", "succeeded"),
    ] {
        let is = |(kind, title): &(&str, &str)| *kind == wanted.0 && (wanted.1.is_empty() || *title == wanted.1);
        let found = rest.iter().position(is).unwrap_or_else(|| panic!("no {wanted:?} in {told:#?}"));
        rest = &rest[found + 1..];
    }
    for object in [
        ["v1", "Namespace", "", &name],
        ["styrmin.io/v1alpha1", "StyrminDeployment", &namespace, &name],
        [HELM, "HelmRelease", &namespace, &name],
    ] {
        assert!(world.plane.get(&object).await.is_none(), "{object:?} is still there");
    }
    let left = world
        .plane
        .kubectl(&[
            "-n",
            &namespace,
            "get",
            "secrets,controllerrevisions",
            "-l",
            &format!("styrmin.io/deployment-id={id}"),
            "-o",
            "name",
        ])
        .await;
    assert_eq!(left, "");
    assert_eq!(world.deployment(&stays).await["state"], "RUNNING");
    assert!(file(&world, &stays).await.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_reaches_the_application_and_a_new_one_rolls_out() {
    let world = World::start().await;
    let client = world.client();
    let input = json!({ "environment": world.environment, "name": "db", "driver": "postgresql", "applicationVersion": "17",
        "parameters": { "password": "first-secret-1" } });
    let (id, task) = client.create(input).await.unwrap();
    succeeded(&world.until_ended(&task).await);
    // The agent says what can be decrypted here, and the server knows that this is enough.
    let query = "query($id: ID!) { cluster(id: $id) { decrypts ageRecipients } }";
    eventually("the server knows what the cluster decrypts", LIMIT, async || {
        let found = client.ok(query, json!({ "id": world.cluster })).await["cluster"].clone();
        if found["decrypts"] == found["ageRecipients"] { Ok(()) } else { Err(found) }
    })
    .await;
    let (namespace, name) = world.object(&id);
    let in_application = async |text: &str| {
        let secrets = world
            .plane
            .kubectl(&[
                "-n",
                &name,
                "get",
                "secrets",
                "--field-selector=type!=helm.sh/release.v1",
                "-o",
                "go-template={{range .items}}{{range $k, $v := .data}}{{$v | base64decode}} {{end}}{{end}}",
            ])
            .await;
        secrets.contains(text)
    };
    assert!(in_application("first-secret-1").await);
    let task = world.update(&id, json!({ "parameters": { "password": "second-secret-2" } })).await;
    succeeded(&world.until_ended(&task).await);
    assert!(in_application("second-secret-2").await && !in_application("first-secret-1").await);
    // Nowhere in clear but in Secrets.
    for text in [
        world
            .plane
            .kubectl(&[
                "get",
                "styrmindeployments,helmreleases,configmaps,events,controllerrevisions",
                "-A",
                "-o",
                "yaml",
            ])
            .await,
        std::fs::read_to_string(world.agent.log()).unwrap(),
        world.server.log(),
        world.deployment(&id).await.to_string(),
    ] {
        assert!(!text.contains("first-secret-1") && !text.contains("second-secret-2"));
    }
    let values = world
        .plane
        .kubectl(&["-n", &namespace, "get", "secrets", "-l", &format!("styrmin.io/deployment-id={id}"), "-o", "name"])
        .await;
    assert_eq!(values.lines().filter(|line| line.contains("-values-")).count(), 1, "old values are removed: {values}");

    // A Secret that somebody else keeps: waited for, taken over, and followed when it changes.
    let reference = |kind: &str| json!({ "parameters": { "password": { kind: { "name": "vault", "key": "pw" } } } });
    let task = world.update(&id, reference("externalSecret")).await;
    let says = async |task: &str, said: &str| {
        eventually(said, LIMIT, async || {
            let query = "query($id: ID!) { task(id: $id) { steps { message } } }";
            let found = client.ok(query, json!({ "id": task })).await;
            if found.to_string().contains(said) { Ok(()) } else { Err(found) }
        })
        .await;
    };
    says(&task, "which the ExternalSecret of this name has to fill").await;
    let secret = |password: &str| json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "namespace": namespace, "name": "vault" }, "stringData": { "pw": password, "other": "x" } });
    world.plane.apply(&secret("third-secret-3")).await;
    succeeded(&world.until_ended(&task).await);
    assert!(in_application("third-secret-3").await && !in_application("second-secret-2").await);
    world.plane.apply(&secret("fourth-secret-4")).await;
    eventually("the application has the new one", LIMIT, async || {
        if in_application("fourth-secret-4").await { Ok(()) } else { Err("not yet") }
    })
    .await;
    // While it is away, what runs is kept as it is.
    let object = ["styrmin.io/v1alpha1", "StyrminDeployment", namespace.as_str(), name.as_str()];
    let is_ready = |found: Option<&Value>| found.is_some_and(|found| found["status"]["phase"] == "Ready");
    world.plane.until(&object, LIMIT, is_ready).await;
    world.plane.kubectl(&["-n", &namespace, "delete", "secret", "vault"]).await;
    let misses = |found: Option<&Value>| {
        let message = found.and_then(|found| found["status"]["message"].as_str());
        message.is_some_and(|message| message.contains("key pw of Secret"))
    };
    world.plane.until(&object, LIMIT, misses).await;
    let policy = "allow-within-namespace";
    world.plane.kubectl(&["-n", &name, "delete", "networkpolicy", policy]).await;
    let release = [HELM, "HelmRelease", namespace.as_str(), name.as_str()];
    let uid = world.plane.get(&release).await.unwrap()["metadata"]["uid"].as_str().unwrap().to_owned();
    let allowed = format!("styrmin.io/allow-delete={uid}");
    world.plane.kubectl(&["-n", &namespace, "annotate", "helmrelease", &name, &allowed]).await;
    world.plane.kubectl(&["-n", &namespace, "delete", "helmrelease", &name]).await;
    let policy = ["networking.k8s.io/v1", "NetworkPolicy", name.as_str(), policy];
    world.plane.until(&policy, LIMIT, |found| found.is_some()).await;
    let is_there = |found: Option<&Value>| found.is_some_and(|found| found["metadata"]["uid"] != uid.as_str());
    world.plane.until(&release, LIMIT, is_there).await;
    let found = world.plane.get(&object).await;
    assert!(misses(found.as_ref()) && is_ready(found.as_ref()), "{found:?}");
    world.plane.apply(&secret("fourth-secret-4")).await;
    let task = world.update(&id, json!({ "parameters": { "password": "fifth-secret-5" } })).await;
    succeeded(&world.until_ended(&task).await);
    assert!(in_application("fifth-secret-5").await && !in_application("fourth-secret-4").await);
    let text = std::fs::read_to_string(world.agent.log()).unwrap();
    assert!(!text.contains("third-secret-3") && !text.contains("fourth-secret-4"));

    // A file that Flux cannot decrypt holds its shard up, and what waits says which; a release that fails tells no
    // secret either.
    world.rules("HOLD").await;
    let pat = Person::of(world.repository().to_str().unwrap()).await;
    let file = pat.path(&id).replace("styrmindeployment", "secrets.sops");
    let stranger = age::x25519::Identity::generate().to_public().to_string();
    let query = "mutation($id: ID!, $r: [String!]) { updateCluster(id: $id, ageRecipients: $r) { cluster { id } } }";
    let text = pat.read(&file);
    let begin = text.find("-----BEGIN AGE").unwrap();
    let broken: String = text
        .char_indices()
        .map(|(at, c)| if at > begin + 40 && at < begin + 60 && c.is_alphanumeric() { 'A' } else { c })
        .collect();
    pat.write(&file, &broken);
    pat.push("Broken").await;
    world.fetch().await;
    let task = world
        .update(
            &id,
            json!({ "config": { "set": { "components": { "database": { "image": "postgres:image-pull" } } } } }),
        )
        .await;
    says(&task, "secrets.sops.yaml").await;
    let edits = "query($id: ID!) { deployment(id: $id) { edits { nodes { id kind state } } } }";
    let edit = client.ok(edits, json!({ "id": id })).await["deployment"]["edits"]["nodes"][0].clone();
    assert_eq!((&edit["kind"], &edit["state"]), (&json!("SECRETS"), &json!("HELD")));
    let decide = "mutation($id: ID!) { decideEdit(id: $id, decision: RESTORE) { state } }";
    client.ok(decide, json!({ "id": edit["id"] })).await;
    says(&task, "ImagePullBackOff").await;
    let refused = client.execute(query, json!({ "id": world.cluster, "r": [stranger] })).await;
    refused.unwrap();
    let change = json!({ "id": id, "input": { "parameters": { "password": "sixth-secret-6" } } });
    let update = "mutation($id: ID!, $input: UpdateDeploymentInput!) { updateDeployment(id: $id, input: $input) { task { id } } }";
    let refused = client.execute(update, change).await.unwrap_err().to_string();
    assert!(refused.contains("could not be decrypted in cluster"), "{refused}");
    for text in [
        world
            .plane
            .kubectl(&[
                "get",
                "styrmindeployments,helmreleases,configmaps,events,controllerrevisions,kustomizations,jobs,pods",
                "-A",
                "-o",
                "yaml",
            ])
            .await,
        std::fs::read_to_string(world.agent.log()).unwrap(),
        world.server.log(),
        world.deployment(&id).await.to_string(),
        git::git(&world.repository(), &["log", "-p", "main"]).await,
    ] {
        for secret in [
            "first-secret-1",
            "second-secret-2",
            "third-secret-3",
            "fourth-secret-4",
            "fifth-secret-5",
            "sixth-secret-6",
        ] {
            assert!(!text.contains(secret), "{secret}");
        }
    }
}

/// The folder has left Git, and the Secret with it, when a Job's last words are read.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_outlives_its_secret_tells_none() {
    let world = World::start_with(|drivers| {
        let file = driver_like(drivers, "postgresql", "checked").join("driver.styrmin.yml");
        let text = std::fs::read_to_string(&file).unwrap();
        let job = "run_job: {component: database, image: 'example.com/tool:exit-1', command: [check]}";
        let action = format!("\n  actions:\n  - {{name: check, hook: upgrade, mode: pre, steps: [{{{job}}}]}}\n");
        std::fs::write(file, text.replacen("\n  actions:\n", &action, 1)).unwrap();
    })
    .await;
    world.rules("HOLD").await;
    let client = world.client();
    let input = json!({ "environment": world.environment, "name": "db", "driver": "checked", "applicationVersion": "16",
        "parameters": { "password": "first-secret-1" } });
    let (id, task) = client.create(input).await.unwrap();
    succeeded(&world.until_ended(&task).await);
    let (namespace, name) = world.object(&id);
    let mut log = std::fs::OpenOptions::new().append(true).open(world.plane.folder().join("container.log")).unwrap();
    writeln!(log, "2026-01-01T00:00:00.000000000Z stdout F password first-secret-1 is refused").unwrap();
    let upgrade =
        "mutation($id: ID!, $v: String!) { upgradeDeployment(id: $id, applicationVersion: $v) { task { id } } }";
    client.ok(upgrade, json!({ "id": id, "v": "17" })).await;
    eventually("the Job is there", LIMIT, async || {
        let jobs = world.plane.kubectl(&["-n", &name, "get", "jobs", "-o", "name"]).await;
        if jobs.contains("styrmin-hook-") { Ok(()) } else { Err(jobs) }
    })
    .await;
    world.agent.kill().await;
    let pat = Person::of(world.repository().to_str().unwrap()).await;
    let folder = pat.path(&id).replace("/styrmindeployment.yaml", "");
    pat.git(&["rm", "-rq", &folder]).await;
    pat.push("A slip").await;
    world.fetch().await;
    let object = ["styrmin.io/v1alpha1", "StyrminDeployment", namespace.as_str(), name.as_str()];
    let is_going = |found: Option<&Value>| found.is_some_and(|found| !found["metadata"]["deletionTimestamp"].is_null());
    world.plane.until(&object, LIMIT, is_going).await;
    let references = ["-n", &namespace, "get", "secrets", "-o", "name"];
    eventually("the Secret is gone", LIMIT, async || {
        let secrets = world.plane.kubectl(&references).await;
        let left = secrets.lines().filter(|name| name.contains(&id) && !name.contains("-values-")).count();
        if left == 0 { Ok(()) } else { Err(secrets) }
    })
    .await;
    world.agent.restart().await;
    let ended = |found: Option<&Value>| found.is_some_and(|found| found.to_string().contains("is refused"));
    let status = world.plane.until(&object, LIMIT, ended).await.unwrap()["status"].to_string();
    assert!(status.contains("password *** is refused") && !status.contains("first-secret-1"), "{status}");
    assert!(!std::fs::read_to_string(world.agent.log()).unwrap().contains("first-secret-1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_cannot_pull_its_image_is_named_and_the_next_change_recovers() {
    let world = World::start().await;
    let client = world.client();
    let (id, task) = client.web(&world.environment, "front").await;
    succeeded(&world.until_ended(&task).await);
    let upgrade = async |version: &str| {
        let query = "mutation($id: ID!, $version: String!) { upgradeDeployment(id: $id, applicationVersion: $version) { task { id } } }";
        let data = client.ok(query, json!({ "id": id, "version": version })).await;
        data["upgradeDeployment"]["task"]["id"].as_str().unwrap().to_owned()
    };
    let task = upgrade("image-pull").await;
    let failing = eventually("the step names the pod", LIMIT, async || {
        let query = "query($id: ID!) { task(id: $id) { state steps { name state message } } }";
        let found = client.ok(query, json!({ "id": task })).await["task"].clone();
        let step = step(&found, "Install or upgrade the HelmRelease").clone();
        if step["state"] == "FAILED" { Ok(step) } else { Err(found) }
    })
    .await;
    let message = failing["message"].as_str().unwrap();
    assert!(message.contains("ImagePullBackOff") && message.contains("pod "), "{message}");
    let task = upgrade("1.28").await;
    succeeded(&world.until_ended(&task).await);
    world.until_state(&id, "RUNNING").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agent_dies_at_any_moment_and_the_change_arrives_all_the_same() {
    let world = World::start().await;
    let client = world.client();
    for round in 0..6_u64 {
        let (id, task) = client.web(&world.environment, &format!("d{round}")).await;
        tokio::time::sleep(Duration::from_millis(400 * round)).await;
        world.agent.kill().await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        world.agent.restart().await;
        succeeded(&world.until_ended(&task).await);
        world.until_state(&id, "RUNNING").await;
        let task = client.delete(&id).await.unwrap().unwrap();
        tokio::time::sleep(Duration::from_millis(500 * round)).await;
        world.agent.kill().await;
        world.agent.restart().await;
        succeeded(&world.until_ended(&task).await);
        world.until_state(&id, "DELETED").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_is_away_during_a_rollout() {
    let mut world = World::start().await;
    let client = world.client();
    // With the server its hosted repository goes too: what Flux needs of it has to be there before.
    let (_, brings_the_chart) = client.web(&world.environment, "first").await;
    succeeded(&world.until_ended(&brings_the_chart).await);
    let (id, task) = client.web(&world.environment, "front").await;
    let (namespace, name) = world.object(&id);
    world
        .plane
        .until(&["styrmin.io/v1alpha1", "StyrminDeployment", &namespace, &name], LIMIT, |found| found.is_some())
        .await;
    world.server.kill().await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    let ready = |found: Option<&Value>| found.is_some_and(|found| found["status"]["phase"] == "Ready");
    world.plane.until(&["styrmin.io/v1alpha1", "StyrminDeployment", &namespace, &name], LIMIT, ready).await;
    world.server.up().await;
    succeeded(&world.until_ended(&task).await);
    world.until_state(&id, "RUNNING").await;
}

/// Server and agent do not hear each other; Flux goes on.
#[tokio::test(flavor = "multi_thread")]
async fn agent_and_server_are_parted_during_a_rollout() {
    let world = World::start().await;
    let client = world.client();
    let (id, task) = client.web(&world.environment, "front").await;
    succeeded(&world.until_ended(&task).await);
    let first = client.set_variable(&id, "A", "1").await.unwrap().unwrap();
    let (namespace, name) = world.object(&id);
    let key = ["styrmin.io/v1alpha1", "StyrminDeployment", namespace.as_str(), name.as_str()];
    let has =
        |value: &'static str| move |found: Option<&Value>| found.is_some_and(|found| found.to_string().contains(value));
    world.plane.until(&key, LIMIT, has(r#""A":"1""#)).await;
    world.link.cut();
    // Nobody tells Flux to look now; it does so by itself.
    let second = client.set_variable(&id, "A", "2").await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_secs(75)).await;
    let task =
        client.ok("query($id: ID!) { task(id: $id) { state steps { state message } } }", json!({ "id": second })).await;
    assert_eq!(task["task"]["state"], "RUNNING", "nobody has told");
    assert!(task.to_string().contains("No report from the agent since"), "people see why: {task:#}");
    tokio::time::sleep(Duration::from_secs(45)).await;
    let ready = |found: Option<&Value>| {
        found.is_some_and(|found| found["status"]["phase"] == "Ready") && has(r#""A":"2""#)(found)
    };
    world.plane.until(&key, LIMIT, ready).await;
    world.link.mend();
    succeeded(&world.until_ended(&second).await);
    world.until_state(&id, "RUNNING").await;
    let ended = world.until_ended(&first).await;
    assert!(["SUCCEEDED", "SUPERSEDED"].contains(&ended["state"].as_str().unwrap()), "{ended:#}");
}

/// What a slip in Git may never do.
#[tokio::test(flavor = "multi_thread")]
async fn a_slip_in_git_tears_nothing_down_and_people_see_why() {
    let world = World::start().await;
    // Otherwise the server would put back what it can before anybody sees it.
    world.rules("HOLD").await;
    let client = world.client();
    let folder = tempfile::tempdir().unwrap();
    let mut deployments = Vec::new();
    for name in ["removed", "moved", "emptied"] {
        let (id, task) = client.web(&world.environment, name).await;
        succeeded(&world.until_ended(&task).await);
        deployments.push(id);
    }
    git::git(folder.path(), &["clone", "--quiet", "-b", "main", world.repository().to_str().unwrap(), "work"]).await;
    let work = folder.path().join("work");
    let shard = format!("environments/{}/s0", world.environment);
    git::git(&work, &["rm", "-rq", &format!("{shard}/{}", deployments[0])]).await;
    git::git(&work, &["mv", &format!("{shard}/{}", deployments[1]), "elsewhere"]).await;
    std::fs::write(work.join(format!("{shard}/{}/styrmindeployment.yaml", deployments[2])), "").unwrap();
    git::git(&work, &["commit", "--quiet", "-am", "A slip"]).await;
    git::git(&work, &["push", "--quiet", "origin", "HEAD:main"]).await;
    let source = ["source.toolkit.fluxcd.io/v1", "GitRepository", "flux-system", "styrmin"];
    world
        .plane
        .kubectl(&[
            "-n",
            source[2],
            "annotate",
            "--overwrite",
            "gitrepository",
            source[3],
            "reconcile.fluxcd.io/requestedAt=now",
        ])
        .await;
    for id in &deployments {
        let seen = eventually("people see that it is not confirmed", LIMIT, async || {
            let found = world.deployment(id).await;
            let said = found["status"]["conditions"]
                .as_array()
                .is_some_and(|all| all.iter().any(|one| one["reason"] == "NotConfirmed"));
            if said { Ok(found) } else { Err(found) }
        })
        .await;
        assert_eq!(
            (seen["status"]["phase"].as_str(), seen["status"]["deleting"].as_bool()),
            (Some("Deleting"), Some(true)),
            "{seen:#}"
        );
        assert_eq!(seen["state"], "RUNNING", "a warning beside the state, not a state: {seen:#}");
        assert!(seen["status"]["message"].as_str().unwrap().contains("keeps running"));
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    for id in &deployments {
        let (namespace, name) = world.object(id);
        let pods = world.plane.kubectl(&["-n", &name, "get", "pods", "-o", "jsonpath={.items[*].status.phase}"]).await;
        assert!(pods.contains("Running"), "{name}: {pods}");
        assert!(world.plane.get(&[HELM, "HelmRelease", &namespace, &name]).await.is_some());
    }
    // Put back: the application was never touched, and the object is a new one.
    let before = world.plane.get(&["v1", "Namespace", "", &world.object(&deployments[0]).1]).await.unwrap();
    git::git(&work, &["revert", "--no-edit", "HEAD"]).await;
    git::git(&work, &["push", "--quiet", "origin", "HEAD:main"]).await;
    world
        .plane
        .kubectl(&[
            "-n",
            source[2],
            "annotate",
            "--overwrite",
            "gitrepository",
            source[3],
            "reconcile.fluxcd.io/requestedAt=later",
        ])
        .await;
    for id in &deployments {
        let (namespace, name) = world.object(id);
        let object = ["styrmin.io/v1alpha1", "StyrminDeployment", namespace.as_str(), name.as_str()];
        let back = |found: Option<&Value>| {
            found.is_some_and(|found| {
                found["metadata"]["deletionTimestamp"].is_null() && condition(found, "Ready", "True").is_some()
            })
        };
        world.plane.until(&object, LIMIT, back).await;
    }
    let after = world.plane.get(&["v1", "Namespace", "", &world.object(&deployments[0]).1]).await.unwrap();
    assert_eq!(before["metadata"]["uid"], after["metadata"]["uid"]);
    // Confirmed by a person instead: it goes.
    git::git(&work, &["rm", "-rq", &format!("{shard}/{}", deployments[0])]).await;
    git::git(&work, &["commit", "--quiet", "-m", "On purpose"]).await;
    git::git(&work, &["push", "--quiet", "origin", "HEAD:main"]).await;
    world
        .plane
        .kubectl(&[
            "-n",
            source[2],
            "annotate",
            "--overwrite",
            "gitrepository",
            source[3],
            "reconcile.fluxcd.io/requestedAt=last",
        ])
        .await;
    let (namespace, name) = world.object(&deployments[0]);
    let object = ["styrmin.io/v1alpha1", "StyrminDeployment", namespace.as_str(), name.as_str()];
    let going = world
        .plane
        .until(&object, LIMIT, |found| found.is_some_and(|found| !found["metadata"]["deletionTimestamp"].is_null()))
        .await
        .unwrap();
    let confirm = format!("styrmin.io/confirm-delete={}", going["metadata"]["uid"].as_str().unwrap());
    world.plane.kubectl(&["-n", &namespace, "annotate", "styrmindeployment", &name, &confirm]).await;
    world.plane.until(&object, LIMIT, |found| found.is_none()).await;
    assert!(world.plane.get(&["v1", "Namespace", "", &name]).await.is_none());
    // The server learns of it from the reports.
    world.until_state(&deployments[0], "DELETED").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_agents_one_leads_and_nothing_flaps() {
    let world = World::start().await;
    let client = world.client();
    let (id, task) = client.web(&world.environment, "front").await;
    succeeded(&world.until_ended(&task).await);
    let second = world.second_agent().await;
    let reporter = async || {
        let query = "query($id: ID!) { cluster(id: $id) { agent { identity epoch } } }";
        client.ok(query, json!({ "id": world.cluster })).await["cluster"]["agent"].clone()
    };
    let first = reporter().await;
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert_eq!(reporter().await, first, "the second waits");
    assert_eq!(world.deployment(&id).await["state"], "RUNNING");
    world.agent.kill().await;
    eventually("the second takes over", LIMIT, async || {
        let now = reporter().await;
        if now["epoch"].as_i64() > first["epoch"].as_i64() && now["identity"] != first["identity"] {
            Ok(())
        } else {
            Err(now)
        }
    })
    .await;
    let task = client.set_variable(&id, "A", "b").await.unwrap().unwrap();
    succeeded(&world.until_ended(&task).await);
    assert!(second.id().await.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn drift_is_put_back() {
    let world = World::start().await;
    let client = world.client();
    let (id, task) = client.web(&world.environment, "front").await;
    succeeded(&world.until_ended(&task).await);
    let (namespace, name) = world.object(&id);
    world.plane.kubectl(&["delete", "namespace", &name]).await;
    let object = ["styrmin.io/v1alpha1", "StyrminDeployment", namespace.as_str(), name.as_str()];
    world
        .plane
        .until(&object, LIMIT, |found| {
            found.is_some_and(|found| found["status"]["driftCorrections"].as_i64() >= Some(1))
        })
        .await;
    world
        .plane
        .until(&["apps/v1", "Deployment", &name, &name], LIMIT, |found| {
            found.is_some_and(|found| found["status"]["readyReplicas"].as_i64() >= Some(1))
        })
        .await;
    world.until_state(&id, "RUNNING").await;

    // The values that Helm is given: the Secret, and whatever somebody adds to the release.
    let secret = values_of(&world, &namespace, &name).await;
    world.plane.kubectl(&["-n", &namespace, "delete", "secret", &secret]).await;
    world.plane.until(&["v1", "Secret", &namespace, &secret], LIMIT, |found| found.is_some()).await;
    let release = [HELM, "HelmRelease", namespace.as_str(), name.as_str()];
    let edit = r#"{"spec":{"values":{"replicas":7},"suspend":true}}"#;
    world.plane.kubectl(&["-n", &namespace, "patch", "helmrelease", &name, "--type=merge", "-p", edit]).await;
    let back = |found: Option<&Value>| found.is_some_and(|found| found["spec"]["values"].is_null());
    let found = world.plane.until(&release, LIMIT, back).await.unwrap();
    assert_eq!(found["spec"]["suspend"], true, "to suspend it is everybody's right");
    let resumed = r#"{"spec":{"suspend":false}}"#;
    world.plane.kubectl(&["-n", &namespace, "patch", "helmrelease", &name, "--type=merge", "-p", resumed]).await;

    // What the charts in the cluster's repository are fetched with.
    world.plane.kubectl(&["-n", &namespace, "delete", "secret", CHART_SOURCE]).await;
    world.plane.until(&["v1", "Secret", &namespace, CHART_SOURCE], LIMIT, |found| found.is_some()).await;
    eventually("it is told", LIMIT, async || {
        let told =
            ["-n", &namespace, "get", "events", "-o", "jsonpath={.items[?(@.reason==\"DriftCorrected\")].message}"];
        let told = world.plane.kubectl(&told).await;
        if told.contains(&format!("Put back Secret {CHART_SOURCE}")) { Ok(()) } else { Err(told) }
    })
    .await;

    // A Service of ours without the label that it is known by is ours still.
    let ours = format!("{}={}", MANAGED_BY.0, MANAGED_BY.1);
    let service = ["-n", &name, "get", "services", "-l", &ours, "-o", "jsonpath={.items[0].metadata.name}"];
    let service = world.plane.kubectl(&service).await;
    let without = format!("{}-", MANAGED_BY.0);
    world.plane.kubectl(&["-n", &name, "label", "service", &service, &without]).await;
    let labelled =
        |found: Option<&Value>| found.is_some_and(|found| found["metadata"]["labels"][MANAGED_BY.0] == MANAGED_BY.1);
    world.plane.until(&["v1", "Service", &name, &service], LIMIT, labelled).await;
    // Nor does it belong to somebody else who says so.
    let other = format!("{}=other", MANAGED_BY.0);
    world.plane.kubectl(&["-n", &name, "label", "--overwrite", "service", &service, &other]).await;
    world.plane.until(&["v1", "Service", &name, &service], LIMIT, labelled).await;
    let corrected = world.plane.get(&object).await.unwrap()["status"]["driftCorrections"].as_i64();
    assert!(corrected >= Some(6), "{corrected:?}");
    world.until_state(&id, "RUNNING").await;
    assert!(world.plane.program(KWOK).id().await.is_some());
}

/// Name of the Secret that a release has its values from.
async fn values_of(world: &World, namespace: &str, name: &str) -> String {
    let release = world.plane.get(&[HELM, "HelmRelease", namespace, name]).await.unwrap();
    release["spec"]["valuesFrom"][0]["name"].as_str().unwrap().to_owned()
}

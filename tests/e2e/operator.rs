//! The operator on real parts: actions around a release, stop and start, the network, drift, and what may
//! not be deleted.

use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;
use styrmin_tests::server::Api as _;
use styrmin_tests::world::{LIMIT, World, driver};
use styrmin_tests::{charts, eventually, http, plane::FLUX};

const HELM: &str = "helm.toolkit.fluxcd.io/v2";

/// Longer than the operator's timer: what it would do by itself it has done by then.
const OVER_A_TIMER: Duration = Duration::from_secs(6);

fn ended(task: &Value, state: &str) {
    assert_eq!(task["state"], state, "{task:#}");
}

/// A deployment of a driver made from the web application.
fn input(world: &World, driver: &str) -> Value {
    json!({ "environment": world.environment, "name": "front", "driver": driver, "applicationVersion": "1.27",
        "parameters": { "image": "nginx" } })
}

/// Asks for a change of a deployment by a mutation on `$id`; gives the task's id.
async fn ask(world: &World, id: &str, mutation: &str) -> String {
    world.client().ask(id, mutation).await.unwrap().unwrap_or_else(|| panic!("{mutation}: no task"))
}

async fn upgrade(world: &World, id: &str, version: &str) -> String {
    let query = "mutation($id: ID!, $version: String!) { upgradeDeployment(id: $id, applicationVersion: $version) { task { id } } }";
    let data = world.client().ok(query, json!({ "id": id, "version": version })).await;
    data["upgradeDeployment"]["task"]["id"].as_str().unwrap().to_owned()
}

/// The text of a file, line by line.
fn lines(file: &Path) -> Vec<String> {
    std::fs::read_to_string(file).unwrap_or_default().lines().map(str::to_owned).collect()
}

async fn object(world: &World, id: &str) -> Value {
    let (namespace, name) = world.object(id);
    world.plane.get(&["styrmin.io/v1alpha1", "StyrminDeployment", &namespace, &name]).await.unwrap()
}

async fn until_object(world: &World, id: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let (namespace, name) = world.object(id);
    let key = ["styrmin.io/v1alpha1", "StyrminDeployment", &namespace, &name];
    world.plane.until(&key, LIMIT, |found| found.is_some_and(&wanted)).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn actions_run_in_order_around_the_release_and_each_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("said");
    let say =
        |what: &str| format!("execute: {{component: web, command: [sh, -c, 'echo {what} >> {}']}}", file.display());
    let job = "run_job: {component: web, image: example.com/tool:1, command: [work]}";
    let actions = format!(
        "  actions:
  - {{name: prepare, hook: setup, mode: pre, steps: [{{{job}}}]}}
  - {{name: fill, hook: setup, mode: core, steps: [{{{}}}, {{wait: {{seconds: 1}}}}]}}
  - {{name: warm, hook: setup, mode: post, steps: [{{{}}}]}}
  - {{name: migrate, hook: upgrade, mode: pre, steps: [{{{}}}, {{stop_components: [web]}}, {{{job}}}, {{start_components: [web]}}]}}
  - {{name: reindex, hook: upgrade, mode: core, steps: [{{{}}}]}}
  - {{name: announce, hook: upgrade, mode: post, steps: [{{{job}}}]}}
  - {{name: save, hook: before_delete, mode: pre, steps: [{{{}}}]}}
",
        say("fill"),
        say("warm"),
        say("dump"),
        say("reindex"),
        say("save"),
    );
    let world = World::start_with(|drivers| driver(drivers, "busy", "web", "web", &actions)).await;
    let (id, task) = world.client().create(input(&world, "busy")).await.unwrap();
    let created = world.until_ended(&task).await;
    ended(&created, "SUCCEEDED");
    assert_eq!(lines(&file), ["fill", "warm"]);
    let steps = created["steps"].as_array().unwrap();
    let at = |name: &str, field: &str| {
        let step = steps.iter().find(|step| step["name"] == name).unwrap_or_else(|| panic!("no {name}: {created:#}"));
        step[field].as_str().unwrap_or_else(|| panic!("{name} has no {field}")).to_owned()
    };
    let order = [
        ("Run prepare", "startedAt"),
        ("Run prepare", "endedAt"),
        ("Install or upgrade the HelmRelease", "startedAt"),
        ("Install or upgrade the HelmRelease", "endedAt"),
        ("Run fill (1 of 2)", "endedAt"),
        ("Run fill (2 of 2)", "endedAt"),
        ("Run warm", "endedAt"),
        ("Wait for the deployment to be ready", "endedAt"),
    ];
    let times: Vec<String> = order.iter().map(|(name, field)| at(name, field)).collect();
    assert!(times.is_sorted(), "{times:#?}");
    let (namespace, name) = world.object(&id);
    let release = world.plane.get(&[HELM, "HelmRelease", &namespace, &name]).await.unwrap();
    let jobs = world.plane.kubectl(&["-n", &name, "get", "jobs", "-o", "json"]).await;
    let jobs: Value = serde_json::from_str(&jobs).unwrap();
    let prepared = jobs["items"][0]["status"]["completionTime"].as_str().unwrap();
    assert!(Some(prepared) <= release["metadata"]["creationTimestamp"].as_str(), "{jobs:#} {release:#}");

    // While it is upgraded, the pods are gone during the migration, and come back before the release.
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::<String>::new()));
    let watch = {
        let (seen, api) = (seen.clone(), world.plane.api("apps/v1", "Deployment", &name));
        let name = name.clone();
        tokio::spawn(async move {
            loop {
                if let Ok(Some(found)) = api.get_opt(&name).await {
                    let spec = &found.data["spec"];
                    let now = format!("{} {}", spec["template"]["spec"]["containers"][0]["image"], spec["replicas"]);
                    let mut seen = seen.lock().unwrap();
                    if seen.last() != Some(&now) {
                        seen.push(now);
                    }
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
    };
    // A pod that takes its time to end.
    let pods = "jsonpath={.items[?(@.metadata.ownerReferences[0].kind==\"ReplicaSet\")].metadata.name}";
    let pod = world.plane.kubectl(&["-n", &name, "get", "pods", "-o", pods]).await;
    let hold = async |finalizers: &str| {
        let held = format!(r#"{{"metadata":{{"finalizers":{finalizers}}}}}"#);
        world.plane.kubectl(&["-n", &name, "patch", "pod", &pod, "--type=merge", "-p", &held]).await;
    };
    hold(r#"["tests.example.com/held"]"#).await;
    let jobs = async || world.plane.kubectl(&["-n", &name, "get", "jobs", "-o", "name"]).await;
    let before = jobs().await;
    let task = upgrade(&world, &id, "1.28").await;
    let says = format!("Waiting for web to be stopped: still there: pod {pod}");
    let waits = |found: &Value| found["status"]["steps"].to_string().contains(&says);
    until_object(&world, &id, waits).await;
    assert_eq!(jobs().await, before, "the next step of the action has not begun");
    hold("[]").await;
    // The deployment is never said to run before the upgrade has ended, whatever the pods do in between.
    let query = "query($id: ID!) { deployment(id: $id) { state tasks(first: 1) { nodes { state } } } }";
    loop {
        let seen = world.client().ok(query, json!({ "id": id })).await["deployment"].clone();
        // The state was read first.
        match (seen["state"].as_str().unwrap(), seen["tasks"]["nodes"][0]["state"].as_str().unwrap()) {
            ("PENDING" | "DEPLOYING", _) => tokio::time::sleep(Duration::from_millis(50)).await,
            ("RUNNING", "SUCCEEDED") => break,
            _ => panic!("{seen:#}"),
        }
    }
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    watch.abort();
    let seen: Vec<String> = seen.lock().unwrap().iter().map(|one| one.replace('"', "")).collect();
    assert_eq!(seen, ["nginx:1.27 1", "nginx:1.27 0", "nginx:1.27 1", "nginx:1.28 1"]);
    assert_eq!(lines(&file), ["fill", "warm", "dump", "reindex"]);
    let status = object(&world, &id).await["status"].clone();
    assert_eq!((status["stoppedComponents"].clone(), status["phase"].as_str()), (Value::Null, Some("Ready")));
    // What monitoring is told of it.
    let metrics = http().get(format!("http://{}/metrics", world.metrics.address())).send().await.unwrap();
    let metrics = metrics.text().await.unwrap();
    let value = |name: &str, labels: &[&str]| -> f64 {
        let of_it = |line: &&str| {
            let rest = line.strip_prefix(name);
            rest.is_some_and(|rest| rest.starts_with(['{', ' '])) && labels.iter().all(|label| line.contains(label))
        };
        let values = metrics.lines().filter(of_it).filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok());
        values.sum()
    };
    assert_eq!(value("styrmin_agent_rollouts_total", &["outcome=\"ready\""]), 2.0, "{metrics}");
    assert_eq!(value("styrmin_agent_phase_seconds_count", &["phase=\"CreatingServices\""]), 2.0, "{metrics}");
    assert!(value("styrmin_agent_phase_seconds_sum", &["phase=\"CreatingHelmRelease\""]) > 0.1, "{metrics}");
    for (name, labels) in [
        ("styrmin_agent_passes_total", &["result=\"done\""][..]),
        ("styrmin_agent_pass_seconds_count", &[]),
        ("styrmin_agent_queue_seconds_count", &[]),
        ("styrmin_agent_api_calls_total", &["verb=\"patch\"", "resource=\"helmreleases\"", "code=\"200\""]),
        ("styrmin_agent_api_calls_total", &["verb=\"watch\"", "code=\"200\""]),
        // The first look at something that is not there.
        ("styrmin_agent_api_calls_total", &["verb=\"get\"", "resource=\"jobs\"", "code=\"404\""]),
    ] {
        assert!(value(name, labels) >= 1.0, "{name} {labels:?}: {metrics}");
    }
    assert!(metrics.contains("\nstyrmin_agent_queue "), "{metrics}");

    // Five changes in quick succession: their actions run once, the last one runs, the others give way.
    let mut tasks = Vec::new();
    for version in ["1.29", "1.30", "1.31", "1.32", "1.33"] {
        tasks.push(upgrade(&world, &id, version).await);
    }
    let last = tasks.pop().unwrap();
    ended(&world.until_ended(&last).await, "SUCCEEDED");
    for task in &tasks {
        ended(&world.until_ended(task).await, "SUPERSEDED");
    }
    assert_eq!(lines(&file), ["fill", "warm", "dump", "reindex", "dump", "reindex"]);
    let image = world.plane.kubectl(&["-n", &name, "get", "deployments", "-o", "jsonpath={..image}"]).await;
    assert_eq!(image, "nginx:1.33");

    // An agent that starts anew runs nothing again.
    world.agent.kill().await;
    world.agent.restart().await;
    let task = world.client().set_variable(&id, "A", "b").await.unwrap().unwrap();
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    assert_eq!(lines(&file).len(), 6);

    let task = world.client().delete(&id).await.unwrap().unwrap();
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    assert_eq!(lines(&file), ["fill", "warm", "dump", "reindex", "dump", "reindex", "save"]);

    // Another deployment of the same driver is set up for itself.
    let mut other = input(&world, "busy");
    other["name"] = "back".into();
    let (_, task) = world.client().create(other).await.unwrap();
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    assert_eq!(lines(&file)[7..], ["fill", "warm"]);
    assert!(world.plane.get(&["v1", "Namespace", "", &name]).await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_action_leaves_the_release_and_the_next_change_works() {
    let folder = tempfile::tempdir().unwrap();
    let flag = folder.path().join("migrated");
    let (dumps, checked) = (folder.path().join("dumps"), folder.path().join("checked"));
    let actions = format!(
        "  actions:
  - {{name: migrate, hook: upgrade, mode: pre, steps: [{{execute: {{component: web, command: [sh, -c, 'test -e {} || {{ echo no such table >&2; exit 3; }}']}}}}]}}
  - {{name: dump, hook: job, mode: core, steps: [{{execute: {{component: web, command: [sh, -c, 'echo dump >> {}']}}}}]}}
  - {{name: check, hook: job, mode: core, steps: [{{execute: {{component: web, command: [test, -e, {}]}}}}]}}
",
        flag.display(),
        dumps.display(),
        checked.display()
    );
    let failing = "  actions:
  - {name: prepare, hook: setup, mode: pre, steps: [{run_job: {component: web, image: 'example.com/tool:exit-1', command: [work]}}]}
";
    let world = World::start_with(|drivers| {
        driver(drivers, "migrating", "web", "web", &actions);
        driver(drivers, "failing", "web", "web", failing);
    })
    .await;
    let client = world.client();
    let (id, task) = client.create(input(&world, "migrating")).await.unwrap();
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    let (namespace, name) = world.object(&id);
    let key = [HELM, "HelmRelease", namespace.as_str(), name.as_str()];
    let before = world.plane.get(&key).await.unwrap();

    let task = upgrade(&world, &id, "1.28").await;
    let failed = world.until_ended(&task).await;
    ended(&failed, "FAILED");
    let steps = failed["steps"].as_array().unwrap();
    let step = steps.iter().find(|step| step["name"] == "Run migrate").unwrap();
    assert_eq!(step["state"], "FAILED");
    let message = step["message"].as_str().unwrap();
    assert!(message.contains("in container web of pod") && message.contains("no such table"), "{message}");
    tokio::time::sleep(OVER_A_TIMER).await;
    let after = world.plane.get(&key).await.unwrap();
    assert_eq!(after["spec"], before["spec"], "the release is not touched");
    assert_eq!(after["metadata"]["generation"], before["metadata"]["generation"]);

    // Once more what failed: it does it again, and fails for the same reason.
    let query = "mutation($task: ID!) { retryTask(task: $task) { task { id workflow } } }";
    let retried = client.ok(query, json!({ "task": task })).await["retryTask"]["task"].clone();
    assert_eq!(retried["workflow"], "upgrade");
    let failed = world.until_ended(retried["id"].as_str().unwrap()).await;
    ended(&failed, "FAILED");
    assert!(
        failed["steps"]
            .as_array()
            .unwrap()
            .iter()
            .any(|step| step["name"] == "Run migrate" && step["state"] == "FAILED")
    );

    // The cause is gone; the next change has the upgrade in it, since it never reached the cluster.
    std::fs::write(&flag, "").unwrap();
    let task = client.set_variable(&id, "A", "b").await.unwrap().unwrap();
    let done = world.until_ended(&task).await;
    ended(&done, "SUCCEEDED");
    let image = world.plane.kubectl(&["-n", &name, "get", "deployments", "-o", "jsonpath={..image}"]).await;
    assert!(image.contains("nginx:1.28"), "{image}");
    let attempts: Vec<Value> = object(&world, &id).await["status"]["steps"].as_array().unwrap().clone();
    let attempt = attempts.iter().find(|step| step["name"] == "Run migrate").unwrap();
    assert_eq!((attempt["attempt"].as_i64(), attempt["state"].as_str()), (Some(3), Some("Succeeded")));

    // Of two requested runs one fails: only that one is tried again.
    ask(&world, &id, "runJob(id: $id, action: \"dump\")").await;
    let task = ask(&world, &id, "runJob(id: $id, action: \"check\")").await;
    ended(&world.until_ended(&task).await, "FAILED");
    std::fs::write(&checked, "").unwrap();
    let query = "mutation($task: ID!) { retryTask(task: $task) { task { id } } }";
    let retried = client.ok(query, json!({ "task": task })).await["retryTask"]["task"]["id"].clone();
    ended(&world.until_ended(retried.as_str().unwrap()).await, "SUCCEEDED");
    assert_eq!(lines(&dumps), ["dump"], "what ended well is not run again");

    // A Job says with its last lines why.
    let (id, task) = client
        .create(json!({ "environment": world.environment, "name": "other", "driver": "failing",
        "applicationVersion": "1.27", "parameters": { "image": "nginx" } }))
        .await
        .unwrap();
    let failed = world.until_ended(&task).await;
    ended(&failed, "FAILED");
    let (namespace, name) = world.object(&id);
    assert!(world.plane.get(&[HELM, "HelmRelease", &namespace, &name]).await.is_none());
    let message = object(&world, &id).await["status"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("styrmin-hook-") && message.lines().count() >= 2, "with the log: {message}");
    // And it goes although nothing of it ever ran.
    let task = client.delete(&id).await.unwrap().unwrap();
    ended(&world.until_ended(&task).await, "SUCCEEDED");
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_and_started_in_the_middle_of_an_upgrade() {
    let world = World::start().await;
    let client = world.client();
    let (id, task) = client.web(&world.environment, "front").await;
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    let (_, name) = world.object(&id);
    let key = ["apps/v1", "Deployment", name.as_str(), name.as_str()];
    // Its pods never start, so Flux waits.
    upgrade(&world, &id, "image-pull").await;
    until_object(&world, &id, |found| found["status"]["phase"] == "CreatingHelmRelease").await;
    let task = ask(&world, &id, "stopDeployment(id: $id)").await;
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    assert_eq!(world.deployment(&id).await["state"], "STOPPED");
    let stopped = object(&world, &id).await["status"].clone();
    assert_eq!((stopped["phase"].as_str(), stopped["displayState"].as_str()), (Some("Ready"), Some("Stopped")));
    world.plane.until(&key, LIMIT, |found| found.is_some_and(|found| found["spec"]["replicas"] == 0)).await;
    let pods = world.plane.kubectl(&["-n", &name, "get", "pods", "-o", "name"]).await;
    assert_eq!(pods.trim(), "");
    // Another image while it is stopped, then started again.
    let task = upgrade(&world, &id, "1.28").await;
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    assert_eq!(world.deployment(&id).await["state"], "STOPPED");
    let task = ask(&world, &id, "startDeployment(id: $id)").await;
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    let running = world.plane.get(&key).await.unwrap();
    assert_eq!((running["spec"]["replicas"].as_i64(), running["status"]["readyReplicas"].as_i64()), (Some(1), Some(1)));
    assert_eq!(object(&world, &id).await["status"]["displayState"], "Running");

    // One component, whose number of pods is not forgotten.
    let replicas = async || world.plane.get(&key).await.unwrap()["spec"]["replicas"].as_i64();
    for (change, expected) in [
        ("scaleDeployment(id: $id, component: \"web\", replicas: 2)", 2),
        ("stopComponents(id: $id, components: [\"web\"])", 0),
        ("startComponents(id: $id, components: [\"web\"])", 2),
    ] {
        let task = ask(&world, &id, change).await;
        ended(&world.until_ended(&task).await, "SUCCEEDED");
        assert_eq!(replicas().await, Some(expected), "{change}");
        assert_eq!(world.deployment(&id).await["state"], "RUNNING", "{change}");
    }

    // From a change that cannot be made to run back to what was.
    let good = world.deployment(&id).await["activeInstance"]["id"].as_str().unwrap().to_owned();
    upgrade(&world, &id, "image-pull").await;
    until_object(&world, &id, |found| found["status"]["phase"] == "CreatingHelmRelease").await;
    let task = ask(&world, &id, &format!("rollbackDeployment(id: $id, toInstance: \"{good}\")")).await;
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    let image = world.plane.get(&key).await.unwrap()["spec"]["template"]["spec"]["containers"][0]["image"].clone();
    assert_eq!((image.as_str(), replicas().await), (Some("nginx:1.28"), Some(2)));
}

/// Names of the service aliases in a namespace.
async fn aliases(world: &World, namespace: &str) -> Vec<String> {
    let found = world
        .plane
        .kubectl(&[
            "-n",
            namespace,
            "get",
            "services",
            "-l",
            "styrmin.io/service-alias=true",
            "-o",
            "jsonpath={range .items[*]}{.metadata.name}={.spec.externalName} {end}",
        ])
        .await;
    found.split_whitespace().map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_network_of_three_deployments_in_two_environments() {
    let world = World::start_with(|drivers| driver(drivers, "shop", "shop", "web", "")).await;
    let client = world.client();
    let other = client.environment(&world.cluster, "other").await;
    let (web, first) = client.web(&world.environment, "front").await;
    let (shop, second) = client
        .create(
            input(&world, "shop")
                .as_object()
                .map(|input| {
                    let mut input = input.clone();
                    input.insert("name".into(), "shop".into());
                    Value::Object(input)
                })
                .unwrap(),
        )
        .await
        .unwrap();
    let (alone, third) = client.web(&other, "front").await;
    for task in [&first, &second, &third] {
        ended(&world.until_ended(task).await, "SUCCEEDED");
    }
    let namespace = |id: &str| format!("styrmin-{id}");
    let expect = async |id: &str, wanted: Vec<String>| {
        eventually("the aliases are as they should be", LIMIT, async || {
            let found = aliases(&world, &namespace(id)).await;
            if found == wanted { Ok(()) } else { Err(found) }
        })
        .await;
    };
    let leads_to = |name: &str, id: &str| format!("{name}={name}.styrmin-{id}.svc.cluster.local");
    expect(&web, vec![leads_to("shop", &shop)]).await;
    expect(&shop, vec![leads_to("web", &web)]).await;
    expect(&alone, vec![]).await;
    // Each has a Service by its declared name, on the pod's port by the name that the chart gave it.
    let service = world.plane.get(&["v1", "Service", &namespace(&shop), "shop"]).await.unwrap();
    assert_eq!(
        (&service["spec"]["ports"][0]["port"], &service["spec"]["ports"][0]["targetPort"]),
        (&json!(8080), &json!("http"))
    );
    let policy = world
        .plane
        .get(&["networking.k8s.io/v1", "NetworkPolicy", &namespace(&shop), "allow-environment-to-web"])
        .await
        .unwrap();
    let rule = &policy["spec"]["ingress"][0];
    assert_eq!(rule["ports"][0]["port"], "http");
    assert_eq!(
        rule["from"][0]["namespaceSelector"]["matchLabels"]["styrmin/environment_id"],
        world.environment.as_str()
    );
    for (id, environment) in [(&web, &world.environment), (&alone, &other)] {
        let found = world.plane.get(&["v1", "Namespace", "", &namespace(id)]).await.unwrap();
        assert_eq!(found["metadata"]["labels"]["styrmin/environment_id"], environment.as_str());
        let egress = ["networking.k8s.io/v1", "NetworkPolicy", &namespace(id), "allow-egress-to-environment"];
        assert!(world.plane.get(&egress).await.is_some());
    }

    // A Service that the chart makes later, under the name of an alias to come, is seen and stays.
    world.plane.kubectl(&["-n", &namespace(&alone), "create", "service", "clusterip", "shop", "--tcp=80:80"]).await;
    let (_, task) = client
        .create(json!({ "environment": other, "name": "shop", "driver": "shop", "applicationVersion": "1.27",
            "parameters": { "image": "nginx" } }))
        .await
        .unwrap();
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    let key = ["styrmin.io/v1alpha1", "StyrminDeployment", &format!("styrmin-env-{other}"), &namespace(&alone)];
    let is_told = |found: Option<&Value>| {
        let mut conditions = found.and_then(|found| found["status"]["conditions"].as_array()).into_iter().flatten();
        conditions.any(|one| one["message"].as_str().unwrap().contains("the chart has a Service of this name"))
    };
    world.plane.until(&key, LIMIT, is_told).await;
    expect(&alone, vec![]).await;

    // What is changed or removed by hand comes back within a timer, and is counted.
    let drifts = async |id: &str| object(&world, id).await["status"]["driftCorrections"].as_i64().unwrap_or_default();
    let ns = namespace(&web);
    let policy = ["networking.k8s.io/v1", "NetworkPolicy", ns.as_str(), "allow-environment-to-web"];
    for (change, key, is_back) in [
        (vec!["-n", &ns, "delete", "service", "shop"], ["v1", "Service", ns.as_str(), "shop"], "/spec/externalName"),
        (vec!["-n", &ns, "delete", "networkpolicy", "allow-environment-to-web"], policy, "/spec/ingress"),
        (
            vec!["-n", &ns, "patch", "service", "web", "--type=merge", "-p", r#"{"spec":{"selector":{"nobody":"x"}}}"#],
            ["v1", "Service", ns.as_str(), "web"],
            "/spec/selector/app.kubernetes.io~1component",
        ),
        (
            // Of another field manager: what is applied beside it leaves it.
            vec![
                "-n",
                &ns,
                "patch",
                "service",
                "web",
                "--type=json",
                "-p",
                r#"[{"op":"add","path":"/spec/ports/0/name","value":"web"},{"op":"add","path":"/spec/ports/-","value":{"name":"other","port":6666,"protocol":"TCP"}}]"#,
            ],
            ["v1", "Service", ns.as_str(), "web"],
            "/spec/ports/0",
        ),
        (
            vec!["label", "namespace", &ns, "styrmin/environment_id-"],
            ["v1", "Namespace", "", ns.as_str()],
            "/metadata/labels/styrmin~1environment_id",
        ),
    ] {
        let before = drifts(&web).await;
        world.plane.kubectl(&change).await;
        world
            .plane
            .until(&key, LIMIT, |found| {
                found.is_some_and(|found| {
                    found.pointer(is_back).is_some()
                        && found.pointer("/spec/selector/nobody").is_none()
                        && found.pointer("/spec/ports/1").is_none()
                })
            })
            .await;
        until_object(&world, &web, |found| {
            found["status"]["driftCorrections"].as_i64() == Some(before + 1)
                && !found["status"]["conditions"].as_array().unwrap().iter().any(|one| one["type"] == "Drifted")
        })
        .await;
    }
    // The record of what was applied, too.
    let (environment, name) = world.object(&web);
    let records = || ["-n", &environment, "get", "controllerrevisions", "-o", "name", "-l", "styrmin.io/deployment-id"];
    let of_web = async || {
        let all = world.plane.kubectl(&records()).await;
        all.lines().filter(|line| line.contains(&name)).map(str::to_owned).collect::<Vec<_>>()
    };
    let before = of_web().await;
    assert_eq!(before.len(), 1);
    world.plane.kubectl(&["-n", &environment, "delete", &before[0]]).await;
    eventually("the record is there again", LIMIT, async || {
        let found = of_web().await;
        if found.len() == 1 { Ok(()) } else { Err(found) }
    })
    .await;
    until_object(&world, &web, |found| found["status"]["driftCorrections"].as_i64() == Some(6)).await;
    let query = "query($id: ID!) { deployment(id: $id) { timeline(first: 100) { nodes { kind title } } } }";
    eventually("the timeline has the corrections", LIMIT, async || {
        let found = client.ok(query, json!({ "id": web })).await["deployment"]["timeline"]["nodes"].clone();
        let mut drifts = found.as_array().unwrap().iter().filter(|entry| entry["kind"] == "DRIFT");
        if drifts.any(|entry| entry["title"] == "correction 6") { Ok(()) } else { Err(found) }
    })
    .await;
    let events = world.plane.kubectl(&["-n", &world.object(&web).0, "get", "events.events.k8s.io", "-o", "json"]).await;
    assert!(events.contains("Put back NetworkPolicy allow-environment-to-web"), "an event says what");

    // Two of one name: the older one has it, and the other is told.
    let (late, task) = client
        .create(json!({ "environment": world.environment, "name": "late", "driver": "shop",
        "applicationVersion": "1.27", "parameters": { "image": "nginx" } }))
        .await
        .unwrap();
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    expect(&web, vec![leads_to("shop", &shop)]).await;
    until_object(&world, &web, |found| {
        let conditions = found["status"]["conditions"].as_array().unwrap();
        conditions.iter().any(|one| one["type"] == "AliasCollision" && one["message"].as_str().unwrap().contains(&shop))
    })
    .await;
    assert_eq!(drifts(&web).await, 6, "an alias that follows a new deployment is no drift");

    // The end of its owner is the end of an alias, and the next one has the name.
    let task = client.delete(&shop).await.unwrap().unwrap();
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    expect(&web, vec![leads_to("shop", &late)]).await;

    // Left behind on purpose: its application and its aliases stay.
    let (environment, name) = world.object(&late);
    world
        .plane
        .kubectl(&["-n", &environment, "annotate", "styrmindeployment", &name, "styrmin.io/skip-teardown=true"])
        .await;
    until_object(&world, &late, |found| found["status"]["latched"]["skipTeardown"] == found["metadata"]["uid"]).await;
    world
        .plane
        .kubectl(&[
            "-n",
            FLUX,
            "patch",
            "kustomization",
            &format!("styrmin-{}-s0", world.environment),
            "--type=merge",
            "-p",
            r#"{"spec":{"suspend":true}}"#,
        ])
        .await;
    world.plane.kubectl(&["-n", &environment, "delete", "styrmindeployment", &name]).await;
    tokio::time::sleep(OVER_A_TIMER).await;
    assert!(world.plane.get(&["apps/v1", "Deployment", &name, &name]).await.is_some());
    expect(&web, vec![leads_to("shop", &late)]).await;
}

/// The cause is gone and the file says what it said: Flux has to be asked to try again.
#[tokio::test(flavor = "multi_thread")]
async fn what_flux_gave_up_on_is_tried_again_when_somebody_asks() {
    let world = World::start().await;
    let client = world.client();
    let policy = json!({ "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
        "metadata": { "name": "refuses" }, "spec": {
            "matchConstraints": { "resourceRules": [{ "apiGroups": ["apps"], "apiVersions": ["v1"],
                "operations": ["CREATE"], "resources": ["deployments"] }] },
            "validations": [{ "expression": "false", "message": "the registry is away" }] } });
    let binding = json!({ "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": { "name": "refuses" }, "spec": { "policyName": "refuses", "validationActions": ["Deny"] } });
    for object in [&policy, &binding] {
        world.plane.apply(object).await;
    }
    let probe = ["create", "deployment", "probe", "--image=example.com/probe:1", "--dry-run=server"];
    eventually("the policy is enforced", LIMIT, async || {
        let answer = world.plane.try_kubectl(&probe).await;
        answer.map_or_else(|_| Ok(()), Err)
    })
    .await;
    let (id, task) = client.web(&world.environment, "front").await;
    let failed = world.until_ended(&task).await;
    ended(&failed, "FAILED");
    let stalled = until_object(&world, &id, |found| found["status"]["phase"] == "Failed").await;
    let message = stalled["status"]["message"].as_str().unwrap();
    assert!(message.contains("the registry is away"), "{message}");
    let (namespace, name) = world.object(&id);
    let events = world.plane.kubectl(&["-n", &namespace, "get", "events", "-o", "json"]).await;
    let events: Value = serde_json::from_str(&events).unwrap();
    let about = |event: &&Value| {
        event["involvedObject"]["kind"] == "StyrminDeployment" && event["involvedObject"]["name"] == name.as_str()
    };
    let reasons: Vec<&str> = events["items"]
        .as_array()
        .unwrap()
        .iter()
        .filter(about)
        .map(|event| event["reason"].as_str().unwrap())
        .collect();
    for reason in ["RolloutStarted", "RolloutFailed"] {
        assert!(reasons.contains(&reason), "{reason}: {reasons:?}");
    }
    world.plane.kubectl(&["delete", "validatingadmissionpolicybinding", "refuses"]).await;
    eventually("the policy is gone", LIMIT, async || world.plane.try_kubectl(&probe).await.map(drop)).await;
    // Nobody asks for anything: it stays as it is.
    tokio::time::sleep(OVER_A_TIMER).await;
    assert_eq!(object(&world, &id).await["status"]["phase"], "Failed");
    let query = "mutation($id: ID!) { retryTask(task: $id) { task { id } } }";
    let again = client.ok(query, json!({ "id": task })).await["retryTask"]["task"]["id"].clone();
    ended(&world.until_ended(again.as_str().unwrap()).await, "SUCCEEDED");
    world.until_state(&id, "RUNNING").await;
    let status = object(&world, &id).await["status"].clone();
    assert_eq!((status["phase"].as_str(), &status["releaseResetAt"]), (Some("Ready"), &Value::Null));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_override_whose_container_is_not_there_is_named() {
    let world = World::start_with(|drivers| driver(drivers, "other", "web", "nope", "")).await;
    let client = world.client();
    let (id, task) = client.create(input(&world, "other")).await.unwrap();
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    let task = client.set_variable(&id, "A", "b").await.unwrap().unwrap();
    let failed = world.until_ended(&task).await;
    ended(&failed, "FAILED");
    let found = until_object(&world, &id, |found| found["status"]["phase"] == "Failed").await;
    let message = found["status"]["message"].as_str().unwrap();
    assert!(message.contains("COMPONENT_CONTAINER_NOT_FOUND") && message.contains("\"nope\""), "{message}");
    // Without it the next change works.
    let task = world.update(&id, json!({ "config": { "remove": ["/env_vars/A"] } })).await;
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    world.until_state(&id, "RUNNING").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn environments_and_releases_are_kept_from_being_deleted() {
    let world = World::start().await;
    let client = world.client();
    let (id, task) = client.web(&world.environment, "front").await;
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    let (namespace, name) = world.object(&id);
    let refused = async |arguments: &[&str]| {
        let output = world.plane.kubectl_fails(arguments).await;
        assert!(output.contains("styrmin.io/allow-delete="), "it says how: {output}");
    };
    refused(&["delete", "namespace", &namespace, "--wait=false"]).await;
    refused(&["-n", &namespace, "delete", "helmrelease", &name]).await;
    refused(&["-n", &namespace, "delete", "helmreleases", "--all"]).await;
    // A controller is refused as well: this is the account that kustomize-controller would have.
    world.plane.kubectl(&["create", "serviceaccount", "-n", FLUX, "somebody"]).await;
    world
        .plane
        .kubectl(&[
            "create",
            "clusterrolebinding",
            "somebody",
            "--clusterrole=cluster-admin",
            &format!("--serviceaccount={FLUX}:somebody"),
        ])
        .await;
    refused(&[
        "-n",
        &namespace,
        "delete",
        "helmrelease",
        &name,
        &format!("--as=system:serviceaccount:{FLUX}:somebody"),
    ])
    .await;
    assert!(world.plane.get(&["apps/v1", "Deployment", &name, &name]).await.is_some());
    refused(&[
        "delete",
        "namespace",
        &namespace,
        "--wait=false",
        &format!("--as=system:serviceaccount:{FLUX}:somebody"),
    ])
    .await;
    // A word that means another object means nothing.
    world.plane.kubectl(&["-n", &namespace, "annotate", "helmrelease", &name, "styrmin.io/allow-delete=true"]).await;
    refused(&["-n", &namespace, "delete", "helmrelease", &name]).await;
    let uid = world.plane.get(&[HELM, "HelmRelease", &namespace, &name]).await.unwrap()["metadata"]["uid"].clone();
    let allow = format!("styrmin.io/allow-delete={}", uid.as_str().unwrap());
    world.plane.kubectl(&["-n", &namespace, "annotate", "--overwrite", "helmrelease", &name, &allow]).await;
    world.plane.kubectl(&["-n", &namespace, "delete", "helmrelease", &name]).await;
    // The operator makes it again, and may delete it itself.
    let key = [HELM, "HelmRelease", namespace.as_str(), name.as_str()];
    world.plane.until(&key, LIMIT, |found| found.is_some_and(|found| found["metadata"]["uid"] != uid)).await;
    world.until_state(&id, "RUNNING").await;
    let task = client.delete(&id).await.unwrap().unwrap();
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    // And an environment can go when somebody means it.
    let uid = world.plane.get(&["v1", "Namespace", "", &namespace]).await.unwrap()["metadata"]["uid"].clone();
    let allow = format!("styrmin.io/allow-delete={}", uid.as_str().unwrap());
    world.plane.kubectl(&["annotate", "namespace", &namespace, &allow]).await;
    world.plane.kubectl(&["delete", "namespace", &namespace, "--wait=false"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_cannot_be_read_disturbs_no_other() {
    let world = World::start().await;
    let client = world.client();
    let (id, task) = client.web(&world.environment, "front").await;
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    // Nothing but the API server's schema keeps such objects out; without it they get in.
    let loose = json!([{ "op": "replace", "path": "/spec/versions/0/schema/openAPIV3Schema",
        "value": { "type": "object", "x-kubernetes-preserve-unknown-fields": true } }]);
    world
        .plane
        .kubectl(&["patch", "crd", "styrmindeployments.styrmin.io", "--type=json", "-p", &loose.to_string()])
        .await;
    let (namespace, _) = world.object(&id);
    for (name, spec) in
        [("styrmin-a", json!({})), ("styrmin-b", json!({ "deploymentId": 7 })), ("styrmin-c", json!("text"))]
    {
        let bad = json!({ "apiVersion": "styrmin.io/v1alpha1", "kind": "StyrminDeployment",
            "metadata": { "name": name, "namespace": namespace }, "spec": spec });
        eventually("the API server takes it", LIMIT, async || {
            world.plane.try_apply(&bad).await.map_err(|error| error.to_string())
        })
        .await;
    }
    // Also for an agent that begins with them.
    world.agent.kill().await;
    world.agent.restart().await;
    let task = client.set_variable(&id, "A", "b").await.unwrap().unwrap();
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    world.until_state(&id, "RUNNING").await;
}

/// The object of a deployment as another one that nobody but the cluster knows of; gives its name.
async fn twin(world: &World, id: &str, change: impl Fn(&mut Value)) -> String {
    let mut twin = object(world, id).await;
    let other = "twintwintwin";
    let name = format!("styrmin-{other}");
    twin["metadata"] = json!({ "name": name, "namespace": twin["metadata"]["namespace"] });
    twin["spec"]["deploymentId"] = other.into();
    twin["spec"]["instanceId"] = "twin".into();
    change(&mut twin["spec"]["context"]);
    twin.as_object_mut().unwrap().remove("status");
    world.plane.apply(&twin).await;
    name
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_is_too_large_says_so_and_disturbs_no_other() {
    let world = World::start().await;
    let client = world.client();
    let (id, task) = client.web(&world.environment, "front").await;
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    // The API server takes it, and not the Secret with its values.
    let large = "x".repeat((1 << 20) + (64 << 10));
    let name = twin(&world, &id, |context| context["parameters"]["config"]["LARGE"] = large.as_str().into()).await;
    let (namespace, _) = world.object(&id);
    let key = ["styrmin.io/v1alpha1", "StyrminDeployment", namespace.as_str(), name.as_str()];
    let says = |found: Option<&Value>| {
        let message = found.and_then(|found| found["status"]["message"].as_str()).unwrap_or_default();
        message.contains("applying Secret") && message.contains("Too long") && message.len() < 3000
    };
    world.plane.until(&key, LIMIT, says).await;
    let task = client.set_variable(&id, "A", "b").await.unwrap().unwrap();
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    world.until_state(&id, "RUNNING").await;
}

/// One of its pods is enough, whatever Flux says.
#[tokio::test(flavor = "multi_thread")]
async fn a_deployment_of_our_own_is_ready_with_one_ready_pod() {
    let half = |drivers: &Path| {
        driver(drivers, "half", "web", "web", "");
        let chart = drivers.join("half/chart");
        std::fs::remove_dir_all(&chart).unwrap();
        std::fs::create_dir_all(chart.join("templates")).unwrap();
        std::fs::write(chart.join("Chart.yaml"), "apiVersion: v2\nname: half\nversion: 1.0.0\n").unwrap();
        let workload = |name: &str, labels: Value| {
            let pod = json!({ "containers": [{ "name": "web", "image": "example.com/web:1" }] });
            json!({ "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": name }, "spec": {
                "selector": { "matchLabels": { "app": name } },
                "template": { "metadata": { "labels": labels }, "spec": pod } } })
        };
        for (name, labels) in
            [("well", json!({ "app": "well" })), ("ill", json!({ "app": "ill", "fault": "image-pull" }))]
        {
            let file = chart.join(format!("templates/{name}.yaml"));
            std::fs::write(file, workload(name, labels).to_string()).unwrap();
        }
    };
    let world = World::start_with(half).await;
    let (id, _) = world.client().create(input(&world, "half")).await.unwrap();
    until_object(&world, &id, |found| found["status"]["phase"] == "CreatingHelmRelease").await;
    let name = twin(&world, &id, |context| context["deployment"]["internal"] = true.into()).await;
    let (namespace, _) = world.object(&id);
    let key = ["styrmin.io/v1alpha1", "StyrminDeployment", namespace.as_str(), name.as_str()];
    world.plane.until(&key, LIMIT, |found| found.is_some_and(|found| found["status"]["phase"] == "Ready")).await;
    let release = world.plane.get(&[HELM, "HelmRelease", &namespace, &name]).await.unwrap();
    assert!(!styrmin_tests::plane::is_ready(Some(&release)), "{release:#}");
    // Of a person's all have to be ready.
    assert_ne!(object(&world, &id).await["status"]["phase"], "Ready");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delete_that_is_reverted_while_it_runs_comes_back() {
    let world = World::start().await;
    let client = world.client();
    let (id, task) = client.web(&world.environment, "front").await;
    ended(&world.until_ended(&task).await, "SUCCEEDED");
    let (namespace, name) = world.object(&id);
    let before = object(&world, &id).await["metadata"]["uid"].clone();
    // Something in the application's namespace does not go yet.
    let holds = json!({ "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": { "name": "holds", "namespace": name, "finalizers": ["example.com/holds"] } });
    world.plane.apply(&holds).await;
    client.delete(&id).await.unwrap().unwrap();
    until_object(&world, &id, |found| {
        found["status"]["message"].as_str().is_some_and(|message| message.contains(&format!("Namespace {name}")))
    })
    .await;
    world.revert().await;
    // The server takes it over as the change of whoever reverted.
    eventually("the deployment is wanted again", LIMIT, async || {
        let found = world.deployment(&id).await;
        if found["state"] == "DEPLOYING" { Ok(()) } else { Err(found["state"].clone()) }
    })
    .await;
    let source = ["source.toolkit.fluxcd.io/v1", "GitRepository", FLUX, "styrmin"];
    let head = world.head().await;
    world
        .plane
        .until(&source, LIMIT, |found| {
            found.is_some_and(|found| found["status"]["artifact"]["revision"].as_str().unwrap().ends_with(&head))
        })
        .await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(object(&world, &id).await["metadata"]["uid"], before, "it is still going");
    world
        .plane
        .kubectl(&[
            "-n",
            &name,
            "patch",
            "configmap",
            "holds",
            "--type=merge",
            "-p",
            r#"{"metadata":{"finalizers":null}}"#,
        ])
        .await;
    let back =
        until_object(&world, &id, |found| found["metadata"]["uid"] != before && found["status"]["phase"] == "Ready")
            .await;
    assert_eq!(back["metadata"]["namespace"], namespace.as_str());
    world
        .plane
        .until(&["apps/v1", "Deployment", &name, &name], LIMIT, |found| {
            found.is_some_and(|found| found["status"]["readyReplicas"].as_i64() >= Some(1))
        })
        .await;
    world.until_state(&id, "RUNNING").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agents_pod_is_admitted_under_the_restricted_profile() {
    let world = World::start().await;
    for object in charts::agent(false).await.iter().filter(|object| object["kind"] == "Deployment") {
        world.plane.apply(object).await;
    }
    let key = ["apps/v1", "Deployment", "styrmin-system", "styrmin-agent"];
    world.plane.until(&key, LIMIT, |found| found.is_some_and(|found| found["status"]["readyReplicas"] == 1)).await;
    // And the profile is in force, also after Flux has applied the namespace.
    let loose = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "loose", "namespace": "styrmin-system" },
        "spec": { "containers": [{ "name": "c", "image": "i" }] } });
    let refused = world.plane.try_apply(&loose).await.unwrap_err().to_string();
    assert!(refused.contains("restricted"), "{refused}");
}

//! Many at once: this needs the whole machine, so it runs alone.

use futures::future::join_all;
use serde_json::{Value, json};
use std::time::Duration;
use styrmin_tests::git;
use styrmin_tests::server::Api as _;
use styrmin_tests::world::{LIMIT, World};

const PAUSE: Duration = Duration::from_millis(500);

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_at_once_all_run_and_so_they_do_with_a_new_configuration() {
    let world = World::start().await;
    let client = world.client();
    let created = join_all((0..100).map(|number| {
        let (client, environment) = (client.clone(), world.environment.clone());
        async move { client.web(&environment, &format!("d{number}")).await }
    }))
    .await;
    join_all(created.iter().map(async |(id, task)| {
        assert_eq!(world.until_ended(task).await["state"], "SUCCEEDED");
        world.until_state(id, "RUNNING").await;
    }))
    .await;
    let before = git::commits(&world.repository()).await;
    assert!(before < 30, "a handful of commits");

    let query = "mutation($id: ID!) { updateEnvironment(id: $id, config: { set: { env_vars: { A: \"b\" } } }) { fanOut { id } } }";
    let fan_out =
        client.ok(query, json!({ "id": world.environment })).await["updateEnvironment"]["fanOut"]["id"].clone();
    let fan_out = fan_out.as_str().unwrap();
    let ended = client.wait_for_fan_out(fan_out, PAUSE, 3 * LIMIT, |_| ()).await.unwrap();
    assert_eq!((ended.changed, ended.outcome()), (100, Some(Ok(()))), "{ended:?}");
    assert_eq!(git::commits(&world.repository()).await, before + 1, "one commit");
    let images = world.plane.kubectl(&["get", "deployments", "-A", "-o", "jsonpath={..env}"]).await;
    assert_eq!(images.matches(r#"{"name":"A","value":"b"}"#).count(), 100, "every one runs with it");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_thousand_pods_leave_the_status_small() {
    const PODS: usize = 2000;
    let world = World::start().await;
    let client = world.client();
    let (id, task) = client.web(&world.environment, "front").await;
    assert_eq!(world.until_ended(&task).await["state"], "SUCCEEDED");
    let (namespace, name) = world.object(&id);
    let pods = world.plane.api("v1", "Pod", &name);
    let pod = |number: usize| {
        serde_json::from_value(
            json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": format!("pod-{number}") },
            // Nobody schedules it, which is quicker.
            "spec": { "schedulerName": "nobody", "containers": [{ "name": "c", "image": "i" }] } }),
        )
        .unwrap()
    };
    let numbers: Vec<usize> = (0..PODS).collect();
    for some in numbers.chunks(50) {
        let created =
            join_all(some.iter().map(async |number| pods.create(&Default::default(), &pod(*number)).await)).await;
        created.into_iter().for_each(|one| drop(one.unwrap()));
    }
    let query = "query($id: ID!, $after: String) { deployment(id: $id) { pods(first: 500, after: $after) { nodes { name } pageInfo { endCursor hasNextPage } } } }";
    styrmin_tests::eventually("all pods are reported", LIMIT, async || {
        let (mut count, mut after) = (0, Value::Null);
        loop {
            let page = client.ok(query, json!({ "id": id, "after": after })).await["deployment"]["pods"].clone();
            count += page["nodes"].as_array().unwrap().len();
            after = page["pageInfo"]["endCursor"].clone();
            if page["pageInfo"]["hasNextPage"] != true {
                break;
            }
        }
        if count > PODS { Ok(()) } else { Err(count) }
    })
    .await;
    assert_eq!(world.deployment(&id).await["state"], "RUNNING");
    let key = ["styrmin.io/v1alpha1", "StyrminDeployment", &namespace, &name];
    let status: Value = world.plane.get(&key).await.unwrap()["status"].clone();
    assert!(status.to_string().len() < 8 << 10, "{status:#}");
}

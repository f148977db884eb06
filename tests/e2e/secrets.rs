//! A secret goes to Git encrypted, to the database encrypted, and nowhere else.

use age::secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;
use styrmin_renderer::yaml;
use styrmin_tests::git;
use styrmin_tests::server::{Api as _, Server};
use styrmin_tests::tools::{run, tool};
use tokio::process::Command;

const SECRET: &str = "correct-horse: \"battery\" 'staple' é\t#";
const OTHER: &str = "0123456789";

fn sops(key: &age::x25519::Identity, arguments: &[&str]) -> Command {
    let mut command = Command::new(tool("sops"));
    command.args(arguments).env("SOPS_AGE_KEY", key.to_string().expose_secret()).env("SOPS_DISABLE_VERSION_CHECK", "1");
    command
}

async fn decrypt(key: &age::x25519::Identity, folder: &Path, text: &str) -> Value {
    let file = folder.join("secrets.sops.yaml");
    std::fs::write(&file, text).unwrap();
    let out = run(&mut sops(key, &["decrypt", file.to_str().unwrap()]), b"").await;
    yaml::from_str(std::str::from_utf8(&out).unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_is_encrypted_for_the_cluster_and_shown_nowhere() {
    let server = Server::start().await;
    let client = server.client();
    let key = age::x25519::Identity::generate();
    let recipient = key.to_public().to_string();
    let (cluster, _) = client.cluster(json!({ "name": "c", "ageRecipient": recipient })).await;
    let environment = client.environment(&cluster, "e").await;
    let repository = server.hosted(&cluster);
    let input = json!({ "environment": environment, "name": "db", "driver": "postgresql", "applicationVersion": "17", "parameters": { "password": SECRET } });
    let (deployment, _) = client.create(input).await.unwrap();
    server.drained(Duration::from_secs(30)).await;
    let folder = format!("environments/{environment}/s0/{deployment}");
    let read = async |name: &str| git::files(&repository).await[&format!("{folder}/{name}")].clone();

    // The real sops decrypts it, and the context names what is in it.
    let first = read("secrets.sops.yaml").await;
    let plain = decrypt(&key, server.folder.path(), &first).await;
    assert_eq!(plain["stringData"], json!({ "password": SECRET }));
    assert_eq!(plain["metadata"]["namespace"], format!("styrmin-env-{environment}"));
    let document: Value = yaml::from_str(&read("styrmindeployment.yaml").await).unwrap();
    let reference = document["spec"]["context"]["parameters"]["password"]["secretRef"].clone();
    assert_eq!(reference["name"], plain["metadata"]["name"]);
    assert_eq!(reference["key"], "password");
    assert_eq!(reference["fingerprint"], plain["metadata"]["annotations"]["fingerprint.styrmin.io/password"]);
    // Another key does not open it, and a changed file is noticed.
    let file = server.folder.path().join("secrets.sops.yaml");
    let stranger = age::x25519::Identity::generate();
    assert!(!sops(&stranger, &["decrypt", file.to_str().unwrap()]).output().await.unwrap().status.success());
    std::fs::write(&file, first.replacen("type: Opaque", "type: Other", 1)).unwrap();
    assert!(!sops(&key, &["decrypt", file.to_str().unwrap()]).output().await.unwrap().status.success());

    let update = async |parameters: Value| {
        let query = "mutation($id: ID!, $input: UpdateDeploymentInput!) { updateDeployment(id: $id, input: $input) { task { id } } }";
        let data = client.ok(query, json!({ "id": deployment, "input": { "parameters": parameters } })).await;
        server.drained(Duration::from_secs(30)).await;
        data["updateDeployment"]["task"]["id"].is_string()
    };
    // Unchanged plain text, unchanged file: by itself, and beside another change.
    assert!(!update(json!({ "password": SECRET })).await);
    assert!(update(json!({ "max_connections": 50 })).await);
    assert_eq!(read("secrets.sops.yaml").await, first);
    let changed = git::git(&repository, &["diff", "--name-only", "main~1", "main"]).await;
    assert_eq!(changed.trim(), format!("{folder}/styrmindeployment.yaml"));
    // Another value: another file, another fingerprint.
    assert!(update(json!({ "password": OTHER })).await);
    let second = read("secrets.sops.yaml").await;
    assert_eq!(decrypt(&key, server.folder.path(), &second).await["stringData"], json!({ "password": OTHER }));
    let document: Value = yaml::from_str(&read("styrmindeployment.yaml").await).unwrap();
    assert_ne!(
        document["spec"]["context"]["parameters"]["password"]["secretRef"]["fingerprint"],
        reference["fingerprint"]
    );
    // Another recipient: the next change encrypts for it.
    let rotated = age::x25519::Identity::generate();
    let query = "mutation($id: ID!, $recipient: String) { updateCluster(id: $id, ageRecipient: $recipient) { cluster { id } } }";
    client.ok(query, json!({ "id": cluster, "recipient": rotated.to_public().to_string() })).await;
    assert!(update(json!({ "max_connections": 60 })).await);
    assert_eq!(
        decrypt(&rotated, server.folder.path(), &read("secrets.sops.yaml").await).await["stringData"],
        json!({ "password": OTHER })
    );

    // It appears in no answer, log, error, or file.
    let query = "query($id: ID!) { deployment(id: $id) { config parameters values { field value origin } instances { nodes { document values { value } } } tasks { nodes { message steps { message } } } } }";
    let answer = client.ok(query, json!({ "id": deployment })).await.to_string();
    assert!(answer.contains("secretRef"));
    let wrong = "mutation($id: ID!, $input: UpdateDeploymentInput!) { updateDeployment(id: $id, input: $input) { task { id } } }";
    let error = client
        .execute(wrong, json!({ "id": deployment, "input": { "parameters": { "password": format!("{OTHER}\n") } } }))
        .await
        .unwrap_err();
    let history = git::git(&repository, &["log", "-p", "--all"]).await;
    let database: Vec<u8> = std::fs::read_dir(server.folder.path().join("data"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .flat_map(|path| std::fs::read(path).unwrap())
        .collect();
    for secret in [SECRET, OTHER, "correct-horse"] {
        for (place, text) in
            [("answer", &answer), ("error", &error.to_string()), ("log", &server.log()), ("history", &history)]
        {
            assert!(!text.contains(secret), "{secret} is in the {place}: {text}");
        }
        assert!(
            !database.windows(secret.len()).any(|window| window == secret.as_bytes()),
            "{secret} is in the data folder"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_replaced_without_a_moment_in_which_nothing_can_be_decrypted() {
    let server = Server::start().await;
    let client = server.client();
    let (old, new) = (age::x25519::Identity::generate(), age::x25519::Identity::generate());
    let name = |key: &age::x25519::Identity| key.to_public().to_string();
    let (cluster, token) = client.cluster(json!({ "name": "c", "ageRecipients": [name(&old)] })).await;
    let environment = client.environment(&cluster, "e").await;
    let input = json!({ "environment": environment, "name": "db", "driver": "postgresql", "applicationVersion": "17", "parameters": { "password": OTHER } });
    let (deployment, _) = client.create(input.clone()).await.unwrap();
    server.drained(Duration::from_secs(30)).await;
    let hosted = server.hosted(&cluster);
    let file = async || {
        git::files(&hosted).await[&format!("environments/{environment}/s0/{deployment}/secrets.sops.yaml")].clone()
    };
    let opens = async |key: &age::x25519::Identity| {
        let path = server.folder.path().join("probe.sops.yaml");
        std::fs::write(&path, file().await).unwrap();
        sops(key, &["decrypt", path.to_str().unwrap()]).output().await.unwrap().status.success()
    };
    assert_eq!((opens(&old).await, opens(&new).await), (true, false));
    let rotate = async |recipients: Value| {
        let query = "mutation($id: ID!, $to: [String!]) { updateCluster(id: $id, ageRecipients: $to) { cluster { ageRecipients } fanOut { id } } }";
        let data = client.execute(query, json!({ "id": cluster, "to": recipients })).await?;
        let id = data["updateCluster"]["fanOut"]["id"].as_str().unwrap().to_owned();
        styrmin_tests::eventually("the fan-out is done", Duration::from_secs(30), async || {
            let data = client.ok("query($id: ID!) { fanOut(id: $id) { state } }", json!({ "id": id })).await;
            if data["fanOut"]["state"] == "FINISHED" { Ok(()) } else { Err(data) }
        })
        .await;
        server.drained(Duration::from_secs(30)).await;
        Ok::<_, styrmin_client::ClientError>(())
    };
    // Both, then only the new one: every deployment's file follows by itself.
    rotate(json!([name(&old), name(&new)])).await.unwrap();
    assert_eq!((opens(&old).await, opens(&new).await), (true, true));
    let before = file().await;
    rotate(json!([name(&new), name(&old)])).await.unwrap();
    assert_eq!(file().await, before, "the order says nothing");
    rotate(json!([name(&new)])).await.unwrap();
    assert_eq!((opens(&old).await, opens(&new).await), (false, true));
    let wrong = rotate(json!([name(&new), "age1nonsense"])).await.unwrap_err().to_string();
    assert!(wrong.contains("age_recipients[1]"), "{wrong}");

    // What the cluster could not decrypt is not committed.
    let mut agent = styrmin_tests::agent::Agent::new(&server, &token, "agent-1", 1);
    let tell = async |client: &styrmin_client::Client, identity: &str, recipients: Value| {
        let query =
            "mutation($i: String!, $r: [String!]!) { reportRecipients(identity: $i, epoch: 1, recipients: $r) }";
        client.execute(query, json!({ "i": identity, "r": recipients })).await
    };
    assert!(tell(&agent.client, "agent-1", json!([])).await.is_err(), "nobody has reported yet");
    agent.deployments(&[]).await;
    assert!(tell(&agent.client, "agent-2", json!([])).await.is_err(), "another one leads");
    tell(&agent.client, "agent-1", json!([name(&old)])).await.unwrap();
    let set = async |password: &str| {
        let query =
            "mutation($id: ID!, $p: JSON!) { updateDeployment(id: $id, input: { parameters: $p }) { task { id } } }";
        client.execute(query, json!({ "id": deployment, "p": { "password": password } })).await
    };
    let refused = set("another-secret-1").await.unwrap_err().to_string();
    assert!(
        refused.contains(&format!("Flux has the key of {} there", name(&old))) && refused.contains("ageRecipients"),
        "{refused}"
    );
    let mut second = input;
    second["name"] = json!("second");
    assert!(client.create(second).await.is_err());
    // What needs no other secret is still possible.
    assert!(client.ask(&deployment, "stopDeployment(id: $id)").await.unwrap().is_some());
    tell(&agent.client, "agent-1", json!([name(&new), name(&old)])).await.unwrap();
    set("another-secret-1").await.unwrap();
    server.drained(Duration::from_secs(30)).await;
    assert!(opens(&new).await);
    let query = "query($id: ID!) { cluster(id: $id) { decrypts ageRecipients } }";
    let found = client.ok(query, json!({ "id": cluster })).await["cluster"].clone();
    assert_eq!(found, json!({ "decrypts": [name(&new), name(&old)], "ageRecipients": [name(&new)] }));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_of_somebody_elses_is_named_and_nothing_is_encrypted() {
    let server = Server::start().await;
    let client = server.client();
    // No recipient is needed for what Styrmin never sees.
    let (cluster, _) = client.cluster(json!({ "name": "c" })).await;
    let environment = client.environment(&cluster, "e").await;
    let input = |password: Value| json!({ "environment": environment, "name": "db", "driver": "postgresql", "applicationVersion": "17", "parameters": { "password": password } });
    for (bad, said) in [
        (json!({ "existingSecret": { "name": "vault" } }), "existingSecret is {name, key}"),
        (json!({ "existingSecret": { "name": "Vault!", "key": "pw" } }), "existingSecret is {name, key}"),
        (json!({ "externalSecret": { "name": "styrmin-x-secrets", "key": "pw" } }), "is one of Styrmin's own"),
        (json!({ "existingSecret": { "name": "vault", "key": "p w" } }), "is no key of a Secret"),
        (json!({ "someSecret": { "name": "vault", "key": "pw" } }), "parameters.password"),
    ] {
        let refused = client.create(input(bad)).await.unwrap_err().to_string();
        assert!(refused.contains(said), "{said}: {refused}");
    }
    let (deployment, _) =
        client.create(input(json!({ "existingSecret": { "name": "vault", "key": "pw" } }))).await.unwrap();
    server.drained(Duration::from_secs(30)).await;
    let hosted = server.hosted(&cluster);
    let files = git::files(&hosted).await;
    let folder = format!("environments/{environment}/s0/{deployment}");
    assert!(!files.contains_key(&format!("{folder}/secrets.sops.yaml")));
    let document: Value = yaml::from_str(&files[&format!("{folder}/styrmindeployment.yaml")]).unwrap();
    assert_eq!(
        document["spec"]["context"]["parameters"]["password"],
        json!({ "secretRef": { "name": "vault", "key": "pw", "fingerprint": "existingSecret" } })
    );
    // A value instead, and a reference again: the one never stays beside the other.
    let recipient = age::x25519::Identity::generate().to_public().to_string();
    let query = "mutation($id: ID!, $r: String) { updateCluster(id: $id, ageRecipient: $r) { cluster { id } } }";
    client.ok(query, json!({ "id": cluster, "r": recipient })).await;
    let query = "mutation($id: ID!, $p: JSON!) { updateDeployment(id: $id, input: { parameters: $p }) { task { id } deployment { parameters } } }";
    let set = async |password: Value| {
        let data = client.ok(query, json!({ "id": deployment, "p": { "password": password } })).await;
        server.drained(Duration::from_secs(30)).await;
        data["updateDeployment"]["deployment"]["parameters"].clone()
    };
    assert_eq!(set(json!(OTHER)).await, json!({}));
    assert!(git::files(&hosted).await.contains_key(&format!("{folder}/secrets.sops.yaml")));
    let reference = json!({ "externalSecret": { "name": "vault", "key": "pw" } });
    assert_eq!(set(reference.clone()).await, json!({ "password": reference }));
    assert!(!git::files(&hosted).await.contains_key(&format!("{folder}/secrets.sops.yaml")));
}

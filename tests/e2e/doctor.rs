//! `clusters doctor` names every broken link of the loop, and nothing when all hold.

use serde_json::{Value, json};
use styrmin_tests::agent::Agent;
use styrmin_tests::eventually;
use styrmin_tests::git::git;
use styrmin_tests::people::Person;
use styrmin_tests::plane::FLUX;
use styrmin_tests::remote::{READ_ONLY, Remote};
use styrmin_tests::server::{Api as _, Server, ctl};
use styrmin_tests::world::{LIMIT, World};

/// Waits until the doctor says that exactly this link is broken, and what to do.
async fn names(server: &Server, link: &str, what: &str, remedy: &str) {
    eventually(&format!("\"{link}\" is broken: {what}"), LIMIT, async || {
        let (fine, text, _) = ctl(server, &["clusters", "doctor", "c"]).await;
        let broken: Vec<&str> = text.lines().filter(|line| line.starts_with("BROKEN")).collect();
        let mut lines = text.lines().skip_while(|line| !line.starts_with(&format!("BROKEN   {link}: ")));
        let said = lines.next().is_some_and(|line| line.contains(what));
        let helps = lines.next().is_some_and(|line| line.starts_with("         → ") && line.contains(remedy));
        if !fine && broken.len() == 1 && said && helps { Ok(()) } else { Err(text) }
    })
    .await;
}

/// Waits until nothing is broken, and nothing asks for attention.
async fn is_green(server: &Server) {
    eventually("the doctor is content", LIMIT, async || {
        let (fine, text, said) = ctl(server, &["clusters", "doctor", "c"]).await;
        if fine && text.lines().all(|line| line.starts_with("OK ")) { Ok(()) } else { Err(format!("{text}{said}")) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_broken_link_of_a_cluster_is_named_with_its_remedy() {
    let world = World::start_as(|_| {}, json!({ "verification": { "trustedKeys": [] } })).await;
    let (server, plane) = (&world.server, &world.plane);
    is_green(server).await;
    let patch = async |kind: &str, patch: &str| {
        plane.kubectl(&["-n", FLUX, "patch", kind, "styrmin", "--type=merge", "-p", patch]).await;
    };
    let secret = async |name: &str, data: Value| {
        let data = json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "namespace": FLUX, "name": name }, "stringData": data });
        plane.apply(&data).await;
    };

    let source = "Flux fetches the repository";
    patch("gitrepository", r#"{"spec":{"suspend":true}}"#).await;
    names(server, source, "it is suspended", "patch gitrepository styrmin").await;
    patch("gitrepository", r#"{"spec":{"suspend":false}}"#).await;
    is_green(server).await;

    secret("styrmin-git", json!({ "password": "wrong" })).await;
    world.fetch().await;
    names(server, source, "authentication required", "Secret flux-system/styrmin-git").await;
    secret("styrmin-git", json!({ "password": world.token })).await;
    world.fetch().await;
    is_green(server).await;

    let link = "Flux applies the files";
    patch("kustomization", r#"{"spec":{"suspend":true}}"#).await;
    names(server, link, "Kustomization styrmin is suspended", "patch kustomization styrmin").await;
    patch("kustomization", r#"{"spec":{"suspend":false}}"#).await;
    is_green(server).await;

    patch("kustomization", r#"{"spec":{"path":"./nowhere"}}"#).await;
    names(server, link, "nowhere", "styrminctl validate .").await;
    patch("kustomization", r#"{"spec":{"path":"./cluster"}}"#).await;
    is_green(server).await;

    let person = Person::of(world.repository().to_str().unwrap()).await;
    person.write("README.md", "Signed by nobody\n");
    person.push("Explain").await;
    world.fetch().await;
    names(server, "Flux accepts the signatures", "signature", "Secret flux-system/styrmin-git-keys").await;
    world.client().environment(&world.cluster, "more").await;
    is_green(server).await;

    let age = plane.get(&["v1", "Secret", FLUX, "styrmin-age"]).await.unwrap();
    plane.kubectl(&["-n", FLUX, "delete", "secret", "styrmin-age"]).await;
    names(server, "Flux decrypts secrets", "Flux has no key for age1", "create secret generic styrmin-age").await;
    let mut again =
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "namespace": FLUX, "name": "styrmin-age" } });
    again["data"] = age["data"].clone();
    plane.apply(&again).await;
    is_green(server).await;

    // An older kind: a field of the status is not in it.
    let path = "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties/appliedDigest";
    let remove = format!(r#"[{{"op":"remove","path":"{path}"}}]"#);
    plane.kubectl(&["patch", "crd", "styrmindeployments.styrmin.io", "--type=json", "-p", &remove]).await;
    world.agent.kill().await;
    world.agent.restart().await;
    names(server, "kind StyrminDeployment", "another one than the agent's", "styrmin-agent apply-crds").await;
    plane.apply(&styrmin_renderer::spec::crd()).await;
    is_green(server).await;

    let hosted = world.repository();
    let aside = hosted.with_extension("aside");
    std::fs::rename(&hosted, &aside).unwrap();
    std::fs::write(&hosted, "no repository").unwrap();
    names(server, "repository can be reached", "the hosted repository", "disk of its data folder").await;
    std::fs::remove_file(&hosted).unwrap();
    std::fs::rename(&aside, &hosted).unwrap();
    is_green(server).await;

    world.agent.kill().await;
    names(server, "agent reports", "it is silent for", "logs deployment/styrmin-agent").await;
    // A kind of Flux that is gone, so that the agent cannot list it.
    plane.kubectl(&["delete", "crd", "ocirepositories.source.toolkit.fluxcd.io"]).await;
    world.agent.restart().await;
    names(server, "agent reports", "it runs, and waits until it can list OCIRepository", "Install what is missing")
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_only_the_server_sees_is_named_too() {
    let server = Server::start().await;
    let folder = tempfile::tempdir().unwrap();
    git(folder.path(), &["init", "--quiet", "--bare", "-b", "main", "r.git"]).await;
    let repository = folder.path().join("r.git");
    let remote = Remote::open(&repository).await;
    let client = server.client();
    let input = json!({ "name": "c", "git": { "url": remote.url() }, "ageRecipient": "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p" });
    let (cluster, token) = client.cluster(input).await;
    server.drained(LIMIT).await;
    names(&server, "agent reports", "it never did", "clusters bootstrap").await;

    let mut agent = Agent::new(&server, &token, "one", 1);
    let head = git(&repository, &["rev-parse", "main"]).await.trim().to_owned();
    let revision = format!("main@sha1:{head}");
    let of_flux = |kind: &str| {
        json!({ "kind": kind, "namespace": FLUX, "name": "styrmin", "ready": "True", "reason": "Succeeded", "message": "m",
            "revision": revision, "attemptedRevision": revision, "suspended": false })
    };
    let facts = async |agent: &Agent, version: &str, seconds: i64| {
        let sent = jiff::Timestamp::from_second(now() + seconds).unwrap().to_string();
        let facts =
            json!({ "version": version, "kind": "CURRENT", "waitsFor": [], "sentAt": sent, "clusterUid": agent.uid });
        let query = "mutation($epoch: Int!, $facts: FactsInput!) { reportFacts(epoch: $epoch, facts: $facts) }";
        agent.client.ok(query, json!({ "epoch": 1, "facts": facts })).await;
    };
    let own = env!("CARGO_PKG_VERSION");
    agent.report("pods", json!([])).await.unwrap();
    agent.report("deployments", json!([])).await.unwrap();
    agent.report("flux", json!([])).await.unwrap();
    facts(&agent, own, 0).await;
    let tell = "mutation($r: [String!]!) { reportRecipients(identity: \"one\", epoch: 1, recipients: $r) }";
    agent.client.ok(tell, json!({ "r": ["age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p"] })).await;
    let (_, text, _) = ctl(&server, &["clusters", "doctor", "c"]).await;
    assert!(text.contains("BROKEN   Flux fetches the repository: there is no GitRepository"), "{text}");
    assert!(text.contains("BROKEN   Flux applies the files: there is no Kustomization"), "{text}");
    agent.report("flux", json!([of_flux("GitRepository"), of_flux("Kustomization")])).await.unwrap();
    is_green(&server).await;

    for (seconds, which) in [(40, "s ahead of the server's"), (-3600, "s behind the server's")] {
        facts(&agent, own, seconds).await;
        names(&server, "clocks", which, "NTP").await;
    }
    facts(&agent, "0.0.9", 0).await;
    let (fine, text, _) = ctl(&server, &["clusters", "doctor", "c"]).await;
    assert!(fine && text.contains("WARNING  agent's version: the agent is 0.0.9, the server"), "{text}");
    facts(&agent, own, 0).await;

    // Nobody may push any more.
    remote.behave(READ_ONLY);
    names(&server, "repository can be written", "trying a push", "the right to push").await;
    remote.behave(200);
    is_green(&server).await;
    remote.down().await;
    names(&server, "repository can be reached", &remote.url(), "network from the server").await;
    remote.up().await;
    is_green(&server).await;

    // Another commit of ours, which Flux does not have.
    client.environment(&cluster, "e").await;
    server.drained(LIMIT).await;
    agent.report("flux", json!([of_flux("GitRepository"), of_flux("Kustomization")])).await.unwrap();
    let (_, text, _) = ctl(&server, &["clusters", "doctor", "c"]).await;
    assert!(text.contains("WARNING  Flux has the newest commit: it has"), "{text}");
}

#[expect(clippy::disallowed_methods, reason = "the clock of the server, which this test cannot set")]
fn now() -> i64 {
    jiff::Timestamp::now().as_second()
}

//! What an agent says, without an agent: for tests of the server's half.

use crate::server::Server;
use serde_json::{Value, json};
use styrmin_client::{Client, ClientError};
use styrmin_renderer::canonical::digest_parts;

/// An agent, as far as the server can tell.
pub struct Agent {
    /// With the cluster's token.
    pub client: Client,
    /// Of the process.
    pub identity: String,
    /// Of the lease.
    pub epoch: i64,
    /// Of the last report.
    pub sequence: i64,
    /// Of the cluster.
    pub uid: String,
}

impl Agent {
    /// One that has not reported yet.
    #[must_use]
    pub fn new(server: &Server, token: &str, identity: &str, epoch: i64) -> Self {
        let client = Client::new(&server.address(), token).unwrap();
        Self { client, identity: identity.into(), epoch, sequence: 0, uid: "uid-1".into() }
    }

    /// Sends a whole snapshot: pods, deployments or flux.
    ///
    /// # Errors
    /// When the server refuses it.
    pub async fn report(&mut self, kind: &str, items: Value) -> Result<Value, ClientError> {
        self.say(kind, items, None, None).await
    }

    /// Sends a snapshot with a digest of the test's choice, as a whole or as what differs.
    ///
    /// # Errors
    /// When the server refuses it.
    pub async fn say(
        &mut self,
        kind: &str,
        items: Value,
        digest: Option<&str>,
        delta: Option<Value>,
    ) -> Result<Value, ClientError> {
        self.sequence += 1;
        let (name, argument, input) = match kind {
            "pods" => ("reportPodStatuses", "pods", "PodStatusInput"),
            "deployments" => ("reportDeploymentStatuses", "deployments", "DeploymentStatusInput"),
            _ => ("reportFluxStatuses", "statuses", "FluxStatusInput"),
        };
        let query = format!(
            "mutation($agent: AgentInput!, $items: [{input}!]!, $digest: String, $delta: DeltaInput) {{ {name}(agent: $agent, {argument}: $items, digest: $digest, delta: $delta) {{ newestRevision confirmedDeletions {{ deploymentId uid }} }} }}"
        );
        let agent = json!({ "identity": self.identity, "epoch": self.epoch, "sequence": self.sequence, "clusterUid": self.uid });
        let variables = json!({ "agent": agent, "items": items, "digest": digest, "delta": delta });
        Ok(self.client.execute(&query, variables).await?[name].clone())
    }

    /// Says that nothing differs from the snapshots of pods, deployments and Flux with these digests.
    ///
    /// # Errors
    /// When the server refuses it.
    pub async fn unchanged(&mut self, digests: [&str; 3]) -> Result<Value, ClientError> {
        self.sequence += 1;
        let [pods, deployments, flux] = digests;
        let digest = digest_parts([self.identity.as_str(), &self.uid, pods, deployments, flux]);
        let variables = json!({ "e": self.epoch, "s": self.sequence, "d": digest });
        Ok(self.client.execute(styrmin_agent::server::UNCHANGED, variables).await?["report"].clone())
    }

    /// Size of the body of such a report.
    #[must_use]
    pub fn unchanged_bytes(&self) -> usize {
        // As the agent has them: epochs are seconds, digests 32 digits.
        let variables = json!({ "e": 96_000_000, "s": 100_000, "d": "0".repeat(32) });
        json!({ "query": styrmin_agent::server::UNCHANGED, "variables": variables }).to_string().len()
    }

    /// Sends a whole snapshot of StyrminDeployments.
    pub async fn deployments(&mut self, items: &[Value]) -> Value {
        self.report("deployments", json!(items)).await.unwrap()
    }
}

//! Tells the server for which age recipients this cluster can decrypt, so that it never commits a secret that Flux
//! could not open. It reads the key that kustomize-controller decrypts with, and lets only public halves out.

use crate::server::Server;
use crate::telling::{self, Told};
use age::x25519::Identity;
use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use kube::api::Api;
use std::collections::BTreeSet;
use std::str::FromStr as _;
use std::sync::Arc;
use std::time::Duration;
use styrmin_renderer::layout::FLUX_NAMESPACE;
use styrmin_renderer::objects::AGE_SECRET;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::info;

/// End of the names under which kustomize-controller looks for age keys.
const SUFFIX: &str = ".agekey";
/// How often it is told although it is the same: the server may have been restored from an older backup.
const TOLD_AGAIN: Duration = Duration::from_secs(600);

/// Looks by `timer` until `stop`.
pub async fn run(client: Client, server: Arc<Server>, timer: Duration, stop: CancellationToken) {
    telling::by_timer(Recipients { client, server, told: None }, timer, stop).await;
}

struct Recipients {
    client: Client,
    server: Arc<Server>,
    /// What was told last, and when.
    told: Option<(BTreeSet<String>, Instant)>,
}

impl Told for Recipients {
    const WHAT: &'static str = "what this cluster can decrypt";

    async fn look(&mut self) -> anyhow::Result<()> {
        let found = recipients(&self.client).await?;
        let is_known = |(known, at): &(BTreeSet<String>, Instant)| *known == found && at.elapsed() < TOLD_AGAIN;
        if !self.told.as_ref().is_some_and(is_known) {
            self.server.recipients(&found).await?;
            if self.told.as_ref().is_none_or(|(known, _)| *known != found) {
                info!(recipients = found.len(), "told the server what this cluster can decrypt");
            }
            self.told = Some((found, Instant::now()));
        }
        Ok(())
    }
}

/// The recipients of the keys that Flux has here.
async fn recipients(client: &Client) -> kube::Result<BTreeSet<String>> {
    let api: Api<Secret> = Api::namespaced(client.clone(), FLUX_NAMESPACE);
    let data = api.get_opt(AGE_SECRET).await?.and_then(|secret| secret.data).unwrap_or_default();
    let texts = data.iter().filter(|(name, _)| name.ends_with(SUFFIX)).map(|(_, text)| &text.0);
    Ok(texts.flat_map(|text| public(&String::from_utf8_lossy(text))).collect())
}

/// The public halves of the keys in a file of age.
fn public(text: &str) -> Vec<String> {
    let identities = text.lines().filter_map(|line| Identity::from_str(line.trim()).ok());
    identities.map(|identity| identity.to_public().to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use age::secrecy::ExposeSecret as _;

    #[test]
    fn a_file_may_hold_several_keys_and_comments() {
        let (one, two) = (Identity::generate(), Identity::generate());
        let text = format!(
            "# created: today\n{}\n\n  {}\nnonsense\n",
            one.to_string().expose_secret(),
            two.to_string().expose_secret()
        );
        assert_eq!(public(&text), [one.to_public().to_string(), two.to_public().to_string()]);
    }
}

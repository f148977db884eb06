package main

import (
	"context"
	"errors"
	"fmt"
	"sort"
	"strings"
	"time"

	"helm.sh/helm/v4/pkg/release/common"
	releasev1 "helm.sh/helm/v4/pkg/release/v1"
	"helm.sh/helm/v4/pkg/storage"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/fluxcd/helm-controller/api/v2"
	"github.com/fluxcd/pkg/apis/meta"
	"github.com/fluxcd/pkg/runtime/conditions"
)

// errRequeue is returned when the next step has to wait for the next pass.
var errRequeue = errors.New("must requeue")

// run takes one step after the other until nothing is left to do, a step fails, or the rest has to wait for
// the next pass: what remedied a failure always ends one.
func (r *reconciler) run(ctx context.Context, j *job, h *helm) error {
	obj := j.obj
	var taken []step
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		now, err := r.assess(ctx, j, h)
		if err != nil {
			conditions.MarkFalse(obj, meta.ReadyCondition, "StateError", "Could not determine release state: %s", err)
			return err
		}
		next, err := decide(obj, now, len(taken) == 0 && v2.ShouldHandleForceRequest(obj))
		if err != nil {
			return stalled(obj, err)
		}
		if r.misbehave == "no-remediation" && next.remediates() {
			next = stepNone
		}
		r.report(obj, now)
		if next == stepNone {
			conditions.Delete(obj, meta.ReconcilingCondition)
			summarize(obj)
			return nil
		}
		for _, earlier := range taken {
			if next.sameSort(earlier) {
				return exhaustedOrLater(obj, errRequeue)
			}
		}
		message := fmt.Sprintf("Running '%s' action with timeout of %s", next, limitOf(obj, next))
		conditions.MarkReconciling(obj, meta.ProgressingReason, "%s", message)
		if next.releases() {
			conditions.MarkUnknown(obj, meta.ReadyCondition, meta.ProgressingReason, "%s", message)
		}
		if err := j.save(ctx); err != nil {
			return err
		}
		if err := r.take(ctx, j, h, next, now); err != nil {
			if conditions.IsReady(obj) {
				conditions.MarkFalse(obj, meta.ReadyCondition, "ReconcileError", "%s", err)
			}
			return err
		}
		if next.remediates() {
			return exhaustedOrLater(obj, errRetriesExceeded)
		}
		taken = append(taken, next)
		if err := j.save(ctx); err != nil {
			return err
		}
	}
}

// exhaustedOrLater asks for another pass while there are retries. Without one, a remedied release is
// stalled (otherwise is errRetriesExceeded); anything else is simply left.
func exhaustedOrLater(obj *v2.HelmRelease, otherwise error) error {
	if remediation := obj.GetActiveRemediation(); remediation == nil || !remediation.RetriesExhausted(obj) {
		conditions.MarkReconciling(obj, meta.ProgressingWithRetryReason, "%s", conditions.GetMessage(obj, meta.ReadyCondition))
		return errRequeue
	}
	if errors.Is(otherwise, errRetriesExceeded) {
		return stalled(obj, otherwise)
	}
	conditions.Delete(obj, meta.ReconcilingCondition)
	return nil
}

func stalled(obj *v2.HelmRelease, err error) error {
	switch {
	case errors.Is(err, errRetriesExceeded):
		conditions.MarkStalled(obj, "RetriesExceeded", "Failed to %s after %d attempt(s)",
			obj.Status.LastAttemptedReleaseAction, obj.GetActiveRemediation().GetFailureCount(obj))
	case errors.Is(err, errMissingTarget):
		conditions.MarkStalled(obj, "MissingRollbackTarget", "Failed to perform remediation: %s", err)
	}
	return err
}

// assess finds out where the release stands.
func (r *reconciler) assess(ctx context.Context, j *job, h *helm) (situation, error) {
	obj := j.obj
	last, err := h.last(obj)
	if err != nil {
		return situation{}, err
	}
	current := obj.Status.History.Latest()
	switch {
	case last == nil:
		return situation{kind: absent}, nil
	case isPending(last):
		return situation{kind: locked}, nil
	case last.Info.Status == common.StatusUninstalled:
		return situation{kind: absent}, nil
	case current == nil, digestOf(last) != current.Digest:
		return situation{kind: unmanaged}, nil
	case last.Info.Status == common.StatusFailed:
		target, err := h.target(obj)
		return situation{kind: failed, rollbackTarget: target}, err
	case last.Info.Status != common.StatusDeployed:
		return situation{}, fmt.Errorf("unable to determine state for release with status '%s'", last.Info.Status)
	}
	metadata := j.chart.Metadata
	if last.Chart.Metadata.Name != metadata.Name || last.Chart.Metadata.Version != metadata.Version ||
		current.ConfigDigest != digestValues(j.values) {
		return situation{kind: outOfSync}, nil
	}
	// The digests are those of the last success, so they say nothing about a generation that was observed.
	if obj.Status.ObservedGeneration != obj.Generation &&
		(obj.Status.ObservedPostRenderersDigest != postRenderersDigest(obj) ||
			obj.Status.ObservedCommonMetadataDigest != commonMetadataDigest(obj)) {
		return situation{kind: outOfSync}, nil
	}
	if detection := obj.GetDriftDetection(); detection.MustDetectChanges() {
		found, err := findDrift(ctx, h.cluster, last, detection.Ignore)
		if found.HasChanges() {
			return situation{kind: drifted, drift: found}, nil
		}
		if err != nil {
			return situation{}, fmt.Errorf("unable to determine cluster state: %w", err)
		}
	}
	return situation{kind: inSync}, nil
}

// report sets what the situation alone says: drift, and for a release that is in sync, success.
func (r *reconciler) report(obj *v2.HelmRelease, now situation) {
	switch now.kind {
	case drifted:
		message := fmt.Sprintf("Cluster state of release %s has drifted from the desired state:\n%s",
			obj.Status.History.Latest().FullReleaseName(), describeDrift(now.drift))
		r.events.Event(obj, corev1.EventTypeWarning, v2.DriftDetectedReason, message)
		conditions.MarkTrue(obj, v2.DriftedCondition, v2.DriftDetectedReason, "%s", message)
	case inSync:
		reportInSync(obj)
		if obj.GetDriftDetection().MustDetectChanges() {
			conditions.MarkFalse(obj, v2.DriftedCondition, v2.NoDriftDetectedReason, "No drift detected against the cluster state")
		}
	}
}

// reportInSync declares success for a release that needs nothing, also after a failure: a rollback may have
// led to just what is asked for now.
func reportInSync(obj *v2.HelmRelease) {
	if r := conditions.Get(obj, v2.RemediatedCondition); r != nil && r.Status == metav1.ConditionTrue {
		conditions.Delete(obj, v2.ReleasedCondition)
		conditions.Delete(obj, v2.RemediatedCondition)
		conditions.MarkTrue(obj, v2.ReleasedCondition, v2.UpgradeSucceededReason, "%s", succeeded("upgrade", obj.Status.History.Latest()))
	}
	if conditions.IsReady(obj) && conditions.IsTrue(obj, v2.ReleasedCondition) {
		return
	}
	switch conditions.GetReason(obj, v2.ReleasedCondition) {
	case v2.InstallFailedReason:
		conditions.MarkTrue(obj, v2.ReleasedCondition, v2.InstallSucceededReason, "%s", succeeded("install", obj.Status.History.Latest()))
	case v2.UpgradeFailedReason:
		conditions.MarkTrue(obj, v2.ReleasedCondition, v2.UpgradeSucceededReason, "%s", succeeded("upgrade", obj.Status.History.Latest()))
	default:
		return
	}
	summarize(obj)
}

func succeeded(action string, current *v2.Snapshot) string {
	return fmt.Sprintf("Helm %s succeeded for release %s with chart %s", action, current.FullReleaseName(), current.VersionedChartName())
}

// take runs one step.
func (r *reconciler) take(ctx context.Context, j *job, h *helm, next step, now situation) error {
	switch next {
	case stepInstall, stepUpgrade:
		return r.release(j, h, next)
	case stepRollback:
		return r.rollback(j.obj, h)
	case stepUninstall:
		return r.uninstallRemedy(j.obj, h)
	case stepUnlock:
		return r.unlock(j.obj, h)
	default:
		return r.correct(ctx, j.obj, h, now)
	}
}

// release installs or upgrades. A failure is returned only when it left nothing in the storage: then the
// same can be tried again at once. Otherwise it is counted, and has to be remedied.
func (r *reconciler) release(j *job, h *helm, next step) error {
	obj, began := j.obj, time.Now()
	defer summarize(obj)
	releases := written{}
	run, action, remediation := h.install, v2.ReleaseActionInstall, obj.GetInstall().GetRemediation()
	reasons := [2]string{v2.InstallSucceededReason, v2.InstallFailedReason}
	if next == stepUpgrade {
		run, action, remediation = h.upgrade, v2.ReleaseActionUpgrade, obj.GetUpgrade().GetRemediation()
		reasons = [2]string{v2.UpgradeSucceededReason, v2.UpgradeFailedReason}
	} else {
		// Nothing may ever be rolled back to what was before an install.
		obj.Status.ClearHistory()
	}
	obj.Status.LastAttemptedReleaseAction = action
	conditions.Delete(obj, v2.TestSuccessCondition)
	conditions.Delete(obj, v2.RemediatedCondition)
	failure := run(obj, j.chart, j.values, releases.saw)
	obj.Status.LastAttemptedReleaseActionDuration = &metav1.Duration{Duration: time.Since(began)}
	releases.record(obj, action)
	if failure == nil {
		message := succeeded(next.String(), obj.Status.History.Latest())
		conditions.MarkTrue(obj, v2.ReleasedCondition, reasons[0], "%s", message)
		r.events.Event(obj, corev1.EventTypeNormal, reasons[0], message)
		return nil
	}
	message := fmt.Sprintf("Helm %s failed for release %s/%s with chart %s@%s: %s", next, obj.GetReleaseNamespace(),
		obj.GetReleaseName(), j.chart.Name(), j.chart.Metadata.Version, strings.TrimSpace(failure.Error()))
	obj.Status.Failures++
	conditions.MarkFalse(obj, v2.ReleasedCondition, reasons[1], "%s", message)
	r.events.Event(obj, corev1.EventTypeWarning, reasons[1], message)
	if len(releases) == 0 {
		return failure
	}
	if r.misbehave != "no-counters" {
		remediation.IncrementFailureCount(obj)
	}
	return nil
}

func (r *reconciler) rollback(obj *v2.HelmRelease, h *helm) error {
	defer summarize(obj)
	previous := obj.Status.History.Previous(true)
	if previous == nil {
		return fmt.Errorf("%w: required to rollback", errMissingTarget)
	}
	to, before := *previous, obj.Status.History.Latest().Digest
	failure := h.rollback(obj, &to, func(rls *releasev1.Release) {
		// What it supersedes or removes is noted too, even what the history had forgotten.
		if !replaceSnapshot(obj, rls, v2.ReleaseActionRollback) {
			prependSnapshot(obj, snapshotOf(rls, releaseActionUnknown))
		}
	})
	message := fmt.Sprintf("Helm rollback to previous release %s with chart %s", to.FullReleaseName(), to.VersionedChartName())
	// Asking for the newest release sorts the history, which the real one does only after a failure.
	return r.remedied(obj, message, failure, failure == nil || obj.Status.History.Latest().Digest != before,
		v2.RollbackSucceededReason, v2.RollbackFailedReason)
}

func (r *reconciler) uninstallRemedy(obj *v2.HelmRelease, h *helm) error {
	current := *obj.Status.History.Latest()
	failure := h.uninstallRelease(obj, func(rls *releasev1.Release) {
		replaceSnapshot(obj, rls, v2.ReleaseActionUninstallRemediation)
	})
	message := fmt.Sprintf("Helm uninstall remediation for release %s with chart %s", current.FullReleaseName(), current.VersionedChartName())
	return r.remedied(obj, message, failure, obj.Status.History.Latest().Digest != current.Digest,
		v2.UninstallSucceededReason, v2.UninstallFailedReason)
}

// remedied notes how a remediation ended.
func (r *reconciler) remedied(obj *v2.HelmRelease, message string, failure error, changed bool, good, bad string) error {
	if failure == nil {
		message += " succeeded"
		conditions.MarkTrue(obj, v2.RemediatedCondition, good, "%s", message)
		r.events.Event(obj, corev1.EventTypeNormal, good, message)
		return nil
	}
	message += " failed: " + strings.TrimSpace(failure.Error())
	obj.Status.Failures++
	conditions.MarkFalse(obj, v2.RemediatedCondition, bad, "%s", message)
	r.events.Event(obj, corev1.EventTypeWarning, bad, message)
	if changed {
		return nil
	}
	return failure
}

// unlock declares a release failed whose action ended with the process that ran it.
func (r *reconciler) unlock(obj *v2.HelmRelease, h *helm) error {
	defer summarize(obj)
	last, err := h.last(obj)
	if err != nil || last == nil || !isPending(last) {
		return err
	}
	state := last.Info.Status
	last.SetStatus(common.StatusFailed, fmt.Sprintf("Release unlocked from stale '%s' state", state))
	releases := storage.Init(watchedDriver{Driver: h.storage, saw: func(rls *releasev1.Release) {
		replaceSnapshot(obj, rls, releaseActionUnknown)
	}})
	if err := releases.Update(last); err != nil {
		return err
	}
	snapshot := snapshotOf(last, releaseActionUnknown)
	message := fmt.Sprintf("Unlocked Helm release %s with chart %s in %s state", snapshot.FullReleaseName(), snapshot.VersionedChartName(), state)
	conditions.MarkFalse(obj, v2.ReleasedCondition, "PendingRelease", "%s", message)
	r.events.Event(obj, corev1.EventTypeNormal, "PendingRelease", message)
	return nil
}

func (r *reconciler) correct(ctx context.Context, obj *v2.HelmRelease, h *helm, now situation) error {
	ctx, cancel := context.WithTimeout(ctx, obj.GetTimeout().Duration)
	defer cancel()
	conditions.MarkUnknown(obj, meta.ReadyCondition, meta.ProgressingReason, "correcting cluster drift")
	done, failure := correctDrift(ctx, h.cluster, now.drift)
	name := obj.Status.History.Latest().FullReleaseName()
	switch {
	case failure != nil:
		r.events.Eventf(obj, corev1.EventTypeWarning, "DriftCorrectionFailed", "Failed to correct cluster state of release %s:\n%s\n%s", name, failure, done)
	case done != "":
		r.events.Eventf(obj, corev1.EventTypeNormal, "DriftCorrected", "Cluster state of release %s has been corrected:\n%s", name, done)
	}
	return nil
}

// summarize makes Ready out of Remediated and Released: the newer generation counts first, then Remediated,
// which always means not ready. It leaves these two in front, as the real one does until the next change of
// a condition sorts them again.
func summarize(obj *v2.HelmRelease) {
	found := obj.Status.Conditions
	if len(found) == 0 {
		return
	}
	rank := func(condition metav1.Condition) int {
		switch condition.Type {
		case v2.RemediatedCondition:
			return 0
		case v2.ReleasedCondition:
			return 1
		default:
			return 2
		}
	}
	sort.SliceStable(found, func(i, j int) bool {
		a, b := rank(found[i]), rank(found[j])
		if a == 2 || b == 2 {
			return a != 2
		}
		return found[i].ObservedGeneration >= found[j].ObservedGeneration && a < b
	})
	first := found[0]
	status := first.Status
	if first.Type == v2.RemediatedCondition {
		status = metav1.ConditionFalse
	}
	if status == metav1.ConditionTrue {
		conditions.Delete(obj, meta.StalledCondition)
	}
	conditions.Set(obj, &metav1.Condition{
		Type: meta.ReadyCondition, Status: status, Reason: first.Reason, Message: first.Message,
	})
	obj.Status.ObservedPostRenderersDigest = postRenderersDigest(obj)
	obj.Status.ObservedCommonMetadataDigest = commonMetadataDigest(obj)
}

func limitOf(obj *v2.HelmRelease, next step) time.Duration {
	limit := obj.GetTimeout()
	switch next {
	case stepInstall:
		limit = obj.GetInstall().GetTimeout(limit)
	case stepUpgrade:
		limit = obj.GetUpgrade().GetTimeout(limit)
	case stepRollback:
		limit = obj.GetRollback().GetTimeout(limit)
	case stepUninstall:
		limit = obj.GetUninstall().GetTimeout(limit)
	}
	return limit.Duration
}

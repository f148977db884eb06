package main

import (
	"errors"
	"fmt"

	v2 "github.com/fluxcd/helm-controller/api/v2"
	"github.com/fluxcd/pkg/ssa/jsondiff"
)

// situation is where a release stands: what the Helm storage and the cluster have, against what the
// object asks for.
type situation struct {
	kind situationKind
	// drift is what differs in the cluster, for drifted.
	drift jsondiff.DiffSet
	// rollbackTarget says whether the release to go back to can be used, for failed.
	rollbackTarget targetState
}

type situationKind int

const (
	// absent: there is no release in the storage.
	absent situationKind = iota
	// locked: the last release is pending, and nobody works on it.
	locked
	// unmanaged: the last release is not one that this object made.
	unmanaged
	// outOfSync: chart, values or post-renderers differ from the release's.
	outOfSync
	// drifted: objects of the release were changed in the cluster.
	drifted
	// failed: the last release failed.
	failed
	// inSync: nothing to do.
	inSync
)

// targetState is what became of the release that a rollback would go back to.
type targetState int

const (
	targetUsable targetState = iota
	// targetUnknown: the object's history has none.
	targetUnknown
	// targetBroken: it is gone from the storage, or it was changed.
	targetBroken
)

// step is one thing to do about a release.
type step int

const (
	stepNone step = iota
	stepInstall
	stepUpgrade
	stepRollback
	stepUninstall
	stepUnlock
	stepCorrectDrift
)

// String is the step's name in conditions.
func (s step) String() string {
	return [...]string{"none", "install", "upgrade", "rollback", "uninstall", "unlock", "correct cluster drift"}[s]
}

// releases reports whether the step makes a release. At most one such step is taken in one pass.
func (s step) releases() bool { return s == stepInstall || s == stepUpgrade }

// remediates reports whether the step makes up for a failed release. It ends the pass.
func (s step) remediates() bool { return s == stepRollback || s == stepUninstall }

// sameSort reports whether two steps may not both be taken in one pass.
func (s step) sameSort(other step) bool {
	return s == other || s.releases() && other.releases() || s.remediates() && other.remediates()
}

var (
	errRetriesExceeded = errors.New("exceeded maximum retries")
	errMissingTarget   = errors.New("missing target release for rollback")
)

// decide says what to do next. It changes nothing but the object's history, which it cuts to what still
// matters.
func decide(obj *v2.HelmRelease, now situation, force bool) (step, error) {
	switch now.kind {
	case locked:
		return stepUnlock, nil
	case unmanaged:
		obj.Status.ClearHistory()
		return stepUpgrade, nil
	case absent:
		if !force && obj.GetInstall().GetRemediation().RetriesExhausted(obj) {
			return stepNone, fmt.Errorf("%w: cannot install release", errRetriesExceeded)
		}
		return stepInstall, nil
	case outOfSync:
		if !force && obj.GetUpgrade().GetRemediation().RetriesExhausted(obj) {
			return stepNone, fmt.Errorf("%w: cannot upgrade release", errRetriesExceeded)
		}
		return stepUpgrade, nil
	case drifted:
		if obj.GetDriftDetection().GetMode() == v2.DriftDetectionEnabled {
			return stepCorrectDrift, nil
		}
		return stepNone, nil
	case failed:
		return afterFailure(obj, now, force)
	default:
		obj.Status.History.Truncate(true)
		if force {
			return stepUpgrade, nil
		}
		return stepNone, nil
	}
}

func afterFailure(obj *v2.HelmRelease, now situation, force bool) (step, error) {
	remediation := obj.GetActiveRemediation()
	switch {
	case remediation == nil, force:
		return stepUpgrade, nil
	case remediation.GetFailureCount(obj) == 0:
		// Counters are reset when what is asked for changes: then the failure says nothing any more.
		return stepUpgrade, nil
	case remediation.RetriesExhausted(obj) && !remediation.MustRemediateLastFailure():
		return stepNone, fmt.Errorf("%w: cannot remediate failed release", errRetriesExceeded)
	}
	obj.Status.History.Truncate(true)
	if remediation.GetStrategy() == v2.UninstallRemediationStrategy {
		return stepUninstall, nil
	}
	switch now.rollbackTarget {
	case targetUnknown:
		return stepNone, fmt.Errorf("%w: cannot remediate failed release", errMissingTarget)
	case targetBroken:
		return stepUpgrade, nil
	default:
		return stepRollback, nil
	}
}

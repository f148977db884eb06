package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"sort"

	"helm.sh/helm/v4/pkg/release"
	"helm.sh/helm/v4/pkg/release/common"
	releasev1 "helm.sh/helm/v4/pkg/release/v1"
	"helm.sh/helm/v4/pkg/storage/driver"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/fluxcd/helm-controller/api/v2"
)

// watchedDriver tells of every release that Helm writes or removes. What Helm returns is not enough: an
// upgrade also supersedes the release before it and removes the oldest ones.
type watchedDriver struct {
	driver.Driver
	saw func(*releasev1.Release)
}

func (d watchedDriver) tell(written release.Releaser) {
	if typed, ok := written.(*releasev1.Release); ok && d.saw != nil {
		d.saw(typed)
	}
}

func (d watchedDriver) Create(key string, rls release.Releaser) error {
	if err := d.Driver.Create(key, rls); err != nil {
		return err
	}
	d.tell(rls)
	return nil
}

func (d watchedDriver) Update(key string, rls release.Releaser) error {
	if err := d.Driver.Update(key, rls); err != nil {
		return err
	}
	d.tell(rls)
	return nil
}

func (d watchedDriver) Delete(key string) (release.Releaser, error) {
	rls, err := d.Driver.Delete(key)
	if err != nil {
		return nil, err
	}
	d.tell(rls)
	return rls, nil
}

// digestOf is a checksum of everything that tells one state of a release from another.
func digestOf(rls *releasev1.Release) string {
	var chart any
	if rls.Chart != nil {
		chart = rls.Chart.Metadata
	}
	return digestJSON([]any{rls.Name, rls.Namespace, rls.Version, rls.Info, chart, rls.Config, rls.Manifest, rls.Hooks})
}

// digestJSON is a checksum of value as JSON, whose maps are sorted by key.
func digestJSON(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		// Only a release that Helm itself has just read from or written as JSON gets here.
		panic(err)
	}
	sum := sha256.Sum256(text)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func digestValues(values map[string]any) string {
	if len(values) == 0 {
		values = map[string]any{}
	}
	return digestJSON(values)
}

func snapshotOf(rls *releasev1.Release, action v2.ReleaseAction) *v2.Snapshot {
	snapshot := &v2.Snapshot{
		APIVersion:   v2.CurrentSnapshotAPIVersion,
		Digest:       digestOf(rls),
		Name:         rls.Name,
		Namespace:    rls.Namespace,
		Version:      rls.Version,
		ConfigDigest: digestValues(rls.Config),
		Action:       action,
	}
	if rls.Chart != nil && rls.Chart.Metadata != nil {
		snapshot.ChartName = rls.Chart.Metadata.Name
		snapshot.ChartVersion = rls.Chart.Metadata.Version
		snapshot.AppVersion = rls.Chart.Metadata.AppVersion
	}
	if rls.Info != nil {
		snapshot.FirstDeployed = metav1.NewTime(rls.Info.FirstDeployed)
		snapshot.LastDeployed = metav1.NewTime(rls.Info.LastDeployed)
		snapshot.Deleted = metav1.NewTime(rls.Info.Deleted)
		snapshot.Status = rls.Info.Status.String()
	}
	return snapshot
}

// replaceSnapshot puts what is known now in place of what was known of the same release. It reports
// whether there was such a one.
func replaceSnapshot(obj *v2.HelmRelease, rls *releasev1.Release, action v2.ReleaseAction) bool {
	for i, known := range obj.Status.History {
		if known.Targets(rls.Name, rls.Namespace, rls.Version) {
			if action == "" {
				action = known.Action
			}
			obj.Status.History[i] = snapshotOf(rls, action)
			return true
		}
	}
	return false
}

func prependSnapshot(obj *v2.HelmRelease, snapshot *v2.Snapshot) {
	obj.Status.History = append(v2.Snapshots{snapshot}, obj.Status.History...)
}

// written collects the releases that an install or an upgrade wrote, by version, each as it was last.
type written map[int]*releasev1.Release

func (w written) saw(rls *releasev1.Release) {
	copied := *rls
	if rls.Info != nil {
		info := *rls.Info
		copied.Info = &info
	}
	w[rls.Version] = &copied
}

// record puts them into the object's history: the newest as a new entry, the next older one that the
// history knows in place of its entry.
func (w written) record(obj *v2.HelmRelease, action v2.ReleaseAction) {
	versions := make([]int, 0, len(w))
	for version := range w {
		versions = append(versions, version)
	}
	sort.Sort(sort.Reverse(sort.IntSlice(versions)))
	for i, version := range versions {
		if i == 0 {
			prependSnapshot(obj, snapshotOf(w[version], action))
		} else if replaceSnapshot(obj, w[version], releaseActionUnknown) {
			return
		}
	}
}

// releaseActionUnknown stands for releases that an action changed in passing.
const releaseActionUnknown v2.ReleaseAction = ""

// isPending reports whether a release waits for an action that somebody began.
func isPending(rls *releasev1.Release) bool {
	switch rls.Info.Status {
	case common.StatusPendingInstall, common.StatusPendingUpgrade, common.StatusPendingRollback:
		return true
	default:
		return false
	}
}

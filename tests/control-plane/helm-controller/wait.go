package main

import (
	"context"
	"time"

	"github.com/fluxcd/cli-utils/pkg/kstatus/polling"
	"github.com/fluxcd/cli-utils/pkg/kstatus/polling/engine"
	"github.com/fluxcd/cli-utils/pkg/kstatus/polling/statusreaders"
	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"github.com/fluxcd/cli-utils/pkg/object"
	jobreader "github.com/fluxcd/pkg/runtime/statusreaders"
	"github.com/fluxcd/pkg/ssa"
	"helm.sh/helm/v4/pkg/kube"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// helmClient is Helm's client, with another way to wait: polling with kstatus, which notices early that
// something can never become ready.
type helmClient struct {
	*kube.Client
	waiter waiter
}

func (c *helmClient) GetWaiter(strategy kube.WaitStrategy) (kube.Waiter, error) {
	waiter := c.waiter
	waiter.hooksOnly = strategy == kube.HookOnlyStrategy
	return waiter, nil
}

func (c *helmClient) GetWaiterWithOptions(strategy kube.WaitStrategy, _ ...kube.WaitOption) (kube.Waiter, error) {
	return c.GetWaiter(strategy)
}

// waiter waits for objects in the cluster.
type waiter struct {
	ctx       context.Context
	client    client.Client
	mapper    meta.RESTMapper
	interval  time.Duration
	hooksOnly bool
}

type readerFor = func(meta.RESTMapper) engine.StatusReader

func (w waiter) manager(readers ...readerFor) *ssa.ResourceManager {
	var options polling.Options
	for _, reader := range readers {
		options.CustomStatusReaders = append(options.CustomStatusReaders, reader(w.mapper))
	}
	return ssa.NewResourceManager(w.client, polling.NewStatusPoller(w.client, w.mapper, options), ssa.Owner{})
}

func (w waiter) wait(resources kube.ResourceList, limit time.Duration, failFast bool, readers ...readerFor) error {
	set, err := identities(resources)
	if err != nil {
		return err
	}
	return w.manager(readers...).WaitForSetWithContext(w.ctx, set, ssa.WaitOptions{
		Interval: w.interval, Timeout: limit, FailFast: failFast,
	})
}

func (w waiter) Wait(resources kube.ResourceList, limit time.Duration) error {
	if w.hooksOnly {
		return nil
	}
	return w.wait(resources, limit, true)
}

func (w waiter) WaitWithJobs(resources kube.ResourceList, limit time.Duration) error {
	if w.hooksOnly {
		return nil
	}
	return w.wait(resources, limit, true, jobreader.NewCustomJobStatusReader)
}

func (w waiter) WaitForDelete(resources kube.ResourceList, limit time.Duration) error {
	if w.hooksOnly {
		return nil
	}
	var objects []*unstructured.Unstructured
	for _, resource := range resources {
		object := &unstructured.Unstructured{}
		object.SetGroupVersionKind(resource.Object.GetObjectKind().GroupVersionKind())
		object.SetNamespace(resource.Namespace)
		object.SetName(resource.Name)
		objects = append(objects, object)
	}
	return w.manager().WaitForTermination(objects, ssa.WaitOptions{Interval: w.interval, Timeout: limit})
}

// WatchUntilReady waits for hooks: a Job or a Pod has to end, anything else has to be there.
func (w waiter) WatchUntilReady(resources kube.ResourceList, limit time.Duration) error {
	return w.wait(resources, limit, false, jobreader.NewCustomJobStatusReader, hookReader)
}

func hookReader(mapper meta.RESTMapper) engine.StatusReader {
	return statusreaders.NewGenericStatusReader(mapper, func(found *unstructured.Unstructured) (*status.Result, error) {
		if found.GetKind() != "Pod" {
			return &status.Result{Status: status.CurrentStatus, Message: "Resource is there"}, nil
		}
		switch phase, _, _ := unstructured.NestedString(found.Object, "status", "phase"); phase {
		case "Succeeded":
			return &status.Result{Status: status.CurrentStatus, Message: "Pod succeeded"}, nil
		case "Failed":
			return &status.Result{Status: status.FailedStatus, Message: "Pod failed"}, nil
		default:
			return &status.Result{Status: status.InProgressStatus, Message: "Pod runs"}, nil
		}
	})
}

// identities leaves out Deployments that are paused: they never become ready.
func identities(resources kube.ResourceList) (object.ObjMetadataSet, error) {
	var set object.ObjMetadataSet
	for _, resource := range resources {
		if found, ok := resource.Object.(*unstructured.Unstructured); ok && found.GetKind() == "Deployment" {
			if paused, _, _ := unstructured.NestedBool(found.Object, "spec", "paused"); paused {
				continue
			}
		}
		identity, err := object.RuntimeToObjMeta(resource.Object)
		if err != nil {
			return nil, err
		}
		set = append(set, identity)
	}
	return set, nil
}

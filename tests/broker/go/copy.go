// A consumer group copies a topic within transactions, offsets included, until a line of input.
package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

func main() {
	protocol, seeds := os.Args[1], strings.Split(os.Args[2], ",")
	source, target := os.Args[3], os.Args[4]
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
		cancel()
	}()
	for ctx.Err() == nil {
		if err := copyRows(ctx, protocol, seeds, source, target); err != nil {
			// A new session ends what is open, and the group goes on from its offsets.
			fmt.Println("again", err)
			time.Sleep(100 * time.Millisecond)
		}
	}
	fmt.Println("done")
}

func copyRows(ctx context.Context, protocol string, seeds []string, source, target string) error {
	clientCtx := context.Background()
	if protocol == "consumer" {
		// The only way to ask this release for the newer protocol of groups.
		clientCtx = context.WithValue(clientCtx, "opt_in_kafka_next_gen_balancer_beta", true)
	}
	session, err := kgo.NewGroupTransactSession(
		kgo.WithContext(clientCtx),
		kgo.SeedBrokers(seeds...),
		kgo.TransactionalID("go-copy"),
		kgo.ConsumerGroup("go-copy"),
		kgo.ConsumeTopics(source),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.RequireStableFetchOffsets(),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.SessionTimeout(6*time.Second),
		kgo.RequestTimeoutOverhead(5*time.Second),
	)
	if err != nil {
		return err
	}
	defer session.Close()
	for ctx.Err() == nil {
		found := session.PollRecords(ctx, 10)
		if found.NumRecords() == 0 {
			continue
		}
		if err := session.Begin(); err != nil {
			return err
		}
		sent := kgo.AbortingFirstErrPromise(session.Client())
		found.EachRecord(func(one *kgo.Record) {
			row := &kgo.Record{Topic: target, Partition: one.Partition, Value: one.Value}
			session.Produce(ctx, row, sent.Promise())
		})
		if _, err := session.End(ctx, sent.Err() == nil); err != nil {
			return err
		}
	}
	return nil
}
